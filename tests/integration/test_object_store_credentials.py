"""Credentials that expire are read anew, and no secret is ever said.

Real: moto and Swift over HTTP; a proxy refuses the old key and repeats secrets in its errors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.errors import StoreUnavailable
from storage.scrubbing import scrubbed
from tests.s3_stores import store_at
from tests.servers import QuirkProxy
from tests.servers.quirk_proxy import Answer, Forward, Request, error_answer


@pytest.mark.parametrize("code", ["ExpiredToken", "ExpiredTokenException", "InvalidToken"])
@pytest.mark.parametrize("place", ["file", "environment"])
def test_expired_credentials_are_read_anew(
    moto_quirks: QuirkProxy, moto_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, place: str
) -> None:
    file = tmp_path / "credentials"

    def hand_out(key: str) -> None:
        if place == "environment":
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
            return
        file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s\naws_session_token = t\n")

    if place == "file":
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    hand_out("OLDKEY")

    def rule(request: Request, forward: Forward) -> Answer:
        if "OLDKEY" in request.headers.get("Authorization", ""):
            hand_out("NEWKEY")
            return error_answer(400 if code != "ExpiredToken" else 403, code)
        return forward(request)

    moto_quirks.rule = rule
    store = store_at(moto_quirks.endpoint, moto_bucket, retries=1)
    store.put("k", b"x")
    assert store.num_retries == 1
    assert store.get("k") == b"x"
    assert "NEWKEY" in moto_quirks.passed[-1].headers["Authorization"]


@pytest.mark.parametrize("operation", ["put", "get", "list", "delete", "create"])
def test_no_secret_is_in_any_message_repr_or_log_record(
    bucket: str,
    quirk_proxy: QuirkProxy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    operation: str,
) -> None:
    secret, token, user = "hunter2hunter2hunter2", "session-token-session", "AKIAIOSFODNN7EXAMPLE"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    monkeypatch.setenv("AWS_SESSION_TOKEN", token)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", user)
    leak = f"signed with {secret} by {user}, https://{user}:{secret}@host/?X-Amz-Signature=abcdef&X-Amz-Security-Token={token}"
    quirk_proxy.rule = lambda *_: error_answer(500, "InternalError", leak.replace("&", "&amp;"))
    store = store_at(quirk_proxy.endpoint, bucket, retries=1)
    calls: dict[str, Callable[[], object]] = {
        "put": lambda: store.put("k", b"x"),
        "get": lambda: store.get("k"),
        "list": lambda: store.list(""),
        "delete": lambda: store.delete(["k"]),
        "create": lambda: store.create("k", b"x"),
    }
    with caplog.at_level(logging.DEBUG), pytest.raises(StoreUnavailable) as caught:
        calls[operation]()
    logging.getLogger("storage").error("failed", exc_info=caught.value)
    said = caplog.text
    error: BaseException | None = caught.value
    while error is not None:
        said += f"{error} {error!r} {error.args}"
        error = error.__cause__ or error.__context__
    assert "InternalError" in said
    for word in (secret, token, user, "abcdef"):
        assert word not in said


def test_a_scrubbed_text_keeps_what_is_no_secret() -> None:
    text = "put shards/step-1 failed: 503 SlowDown (s3://bucket/run), tokens=512, design: ok"
    assert scrubbed(text) == text.replace("tokens=512", "tokens=512")

"""Why a worker did not start: what Ray hands back for an error raised over there, and for a process that is gone."""

from __future__ import annotations

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from orchestrator.start_failure import is_refusal, reason_of
from storage.errors import StoreUnavailable


def raised_there(cause: Exception) -> RayTaskError:
    return RayTaskError("prepare", f"Traceback (most recent call last):\n  ...\n{type(cause).__name__}: {cause}", cause)


def test_an_error_of_prepare_is_a_refusal_told_in_one_line() -> None:
    error = raised_there(ValueError("Unrecognized model\nidentifier: lama"))
    assert is_refusal(error)
    assert reason_of(error) == "ValueError: Unrecognized model identifier: lama"


@pytest.mark.parametrize(
    "cause", [StoreUnavailable("get", "card.json", "timed out"), OSError("no space left"), MemoryError()]
)
def test_what_may_pass_is_no_refusal(cause: Exception) -> None:
    assert not is_refusal(raised_there(cause))


def test_an_error_of_the_constructor_is_a_refusal_and_keeps_its_message() -> None:
    error = ActorDiedError(raised_there(ModuleNotFoundError("No module named 'mine'")))
    assert is_refusal(error)
    assert "No module named 'mine'" in reason_of(error)


def test_a_process_that_is_gone_did_not_refuse() -> None:
    assert not is_refusal(ActorDiedError())


def test_a_long_reason_is_cut() -> None:
    assert len(reason_of(RuntimeError("x" * 100_000))) < 3_000

"""Servers that leave out what others do, and answers that mean "never" or "not now".

Real: moto and Swift over HTTP. Each rule of the proxy is one kind of server; every one has to carry the same work.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from storage.errors import ObjectExists, ObjectMissing, StoreRefused, StoreUnavailable
from storage.object_store import ObjectEntry
from storage.store_facts import learn_store
from tests.s3_stores import store_at
from tests.servers import QuirkProxy
from tests.servers.quirk_proxy import Answer, Forward, Request, error_answer


def _ignores_conditions(request: Request, forward: Forward) -> Answer:
    return forward(_without(request, "if-none-match"))


def _refuses_conditions(status: int, code: str) -> Callable[[Request, Forward], Answer]:
    def rule(request: Request, forward: Forward) -> Answer:
        if "if-none-match" in {name.lower() for name in request.headers}:
            return error_answer(status, code)
        return forward(request)

    return rule


def _ignores_ranges(request: Request, forward: Forward) -> Answer:
    return forward(_without(request, "range"))


def _has_no_bulk_delete_lists_or_heads(request: Request, forward: Forward) -> Answer:
    if request.method == "HEAD" or "delete" in request.query or request.operation.startswith("list-"):
        return error_answer(501, "NotImplemented")
    return forward(request)


def _lists_as_the_first_version(request: Request, forward: Forward) -> Answer:
    """Does not know list-type=2 and pages by two."""
    if request.operation != "list":
        return forward(request)
    keys = [entry.key for entry in _LISTED if entry.key.startswith(request.query.get("prefix", ""))]
    keys = [key for key in keys if key > request.query.get("marker", "")]
    contents = "".join(f"<Contents><Key>{key}</Key><Size>1</Size></Contents>" for key in keys[:2])
    truncated = "true" if len(keys) > 2 else "false"
    body = f"<ListBucketResult><IsTruncated>{truncated}</IsTruncated>{contents}</ListBucketResult>"
    return Answer(200, body.encode(), {"Content-Type": "application/xml"})


_LISTED = [ObjectEntry(key=f"run/s/{number}", size=1) for number in range(7)]


def _refuses_checksums(request: Request, forward: Forward) -> Answer:
    names = {name.lower() for name in request.headers}
    if any(name.startswith(("x-amz-checksum", "x-amz-trailer", "x-amz-sdk-checksum")) for name in names):
        return error_answer(400, "InvalidArgument", "checksums are not supported")
    return forward(request)


def _empty_etags(request: Request, forward: Forward) -> Answer:
    answer = forward(request)
    if request.operation in ("put", "get", "head"):
        answer.headers = {name: value for name, value in answer.headers.items() if name.lower() != "etag"}
    return answer


def _sends_no_length(request: Request, forward: Forward) -> Answer:
    answer = forward(request)
    answer.has_length = request.operation not in ("get", "head")
    return answer


def _without(request: Request, header: str) -> Request:
    kept = {name: value for name, value in request.headers.items() if name.lower() != header}
    return Request(request.method, request.target, kept, request.body)


@pytest.mark.parametrize(
    ("rule", "create"),
    [
        (_ignores_conditions, "ignored"),
        (_refuses_conditions(501, "NotImplemented"), "unsupported"),
        (_refuses_conditions(400, "InvalidArgument"), "unsupported"),
        (_refuses_conditions(403, "AccessDenied"), "unknown"),
        (_has_no_bulk_delete_lists_or_heads, "honoured"),
        (_ignores_ranges, "honoured"),
        (_refuses_checksums, "honoured"),
        (_empty_etags, "honoured"),
        (_sends_no_length, "honoured"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_every_operation_works_on_a_server_that_leaves_things_out(
    moto_quirks: QuirkProxy, moto_bucket: str, rule: Callable[[Request, Forward], Answer], create: str
) -> None:
    store = store_at(moto_quirks.endpoint, moto_bucket)
    moto_quirks.rule = rule
    store.put("a/1", bytes(range(100)))
    store.put("a/2", b"")
    assert store.get("a/1") == bytes(range(100))
    assert store.get("a/2") == b""
    assert store.get_range("a/1", 10, 5) == bytes(range(10, 15))
    with pytest.raises(StoreUnavailable):
        store.get_range("a/1", 90, 20)
    assert [entry.size for entry in store.list("a/")] == [100, 0]
    store.create("c/1", b"first")
    if create != "ignored":
        with pytest.raises(ObjectExists):
            store.create("c/1", b"second")
    assert store.get("c/1") == b"first"
    with pytest.raises(ObjectMissing):
        store.get("a/none")
    store.delete(["a/1", "a/2", "a/none"])
    assert store.list("a/") == []
    assert store.abort_uploads("", older_than_s=0.0) == 0
    facts = learn_store(store)
    assert facts.create_on_put == create
    assert facts.exact_ranges == "yes"
    assert [entry.key for entry in store.list("")] == ["c/1"]
    assert moto_quirks.expected_continue == 0, "no request waits for a server's 100-continue"


def test_a_listing_of_a_server_that_knows_only_its_first_version_is_complete(
    bucket: str, quirk_proxy: QuirkProxy
) -> None:
    quirk_proxy.rule = _lists_as_the_first_version
    store = store_at(quirk_proxy.endpoint, bucket)
    assert [entry.key for entry in store.list("s/")] == [f"s/{number}" for number in range(7)]


def test_a_listing_that_does_not_move_on_is_an_error_not_a_short_listing(bucket: str, quirk_proxy: QuirkProxy) -> None:
    body = (
        b"<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>same</NextContinuationToken>"
        b"<Contents><Key>run/s/1</Key><Size>1</Size></Contents></ListBucketResult>"
    )
    quirk_proxy.rule = lambda _, __: Answer(200, body, {"Content-Type": "application/xml"})
    with pytest.raises(StoreUnavailable, match="does not move on"):
        store_at(quirk_proxy.endpoint, bucket).list("s/")


def test_a_range_from_elsewhere_is_refused(bucket: str, quirk_proxy: QuirkProxy) -> None:
    store = store_at(quirk_proxy.endpoint, bucket)
    store.put("k", bytes(range(100)))

    def rule(request: Request, forward: Forward) -> Answer:
        if request.operation == "get":
            return Answer(206, bytes(10), {"Content-Range": "bytes 0-9/100"})
        return forward(request)

    quirk_proxy.rule = rule
    with pytest.raises(StoreUnavailable, match="bytes from 0 came"):
        store.get_range("k", 50, 10)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (403, "AccessDenied"),
        (403, "InvalidAccessKeyId"),
        (403, "SignatureDoesNotMatch"),
        (404, "NoSuchBucket"),
        (400, "InvalidBucketName"),
        (405, "MethodNotAllowed"),
    ],
)
def test_what_asking_again_will_not_change_is_refused_at_once(
    bucket: str, quirk_proxy: QuirkProxy, status: int, code: str
) -> None:
    quirk_proxy.rule = lambda _, __: error_answer(status, code)
    store = store_at(quirk_proxy.endpoint, bucket, retries=3)
    with pytest.raises(StoreRefused):
        store.put("k", b"x")
    assert len(quirk_proxy.passed) == 1


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (500, "InternalError"),
        (503, "SlowDown"),
        (503, "ServiceUnavailable"),
        (429, "TooManyRequests"),
        (502, "Bad"),
        (400, "RequestTimeout"),
        (409, "OperationAborted"),
        (403, "RequestTimeTooSkewed"),
        (400, "BadDigest"),
    ],
)
def test_what_passes_is_asked_again_and_counted(bucket: str, quirk_proxy: QuirkProxy, status: int, code: str) -> None:
    left = [2]

    def rule(request: Request, forward: Forward) -> Answer:
        left[0] -= 1
        return error_answer(status, code) if left[0] >= 0 else forward(request)

    quirk_proxy.rule = rule
    store = store_at(quirk_proxy.endpoint, bucket, retries=3)
    store.put("k", b"x")
    assert store.num_retries == 2
    assert store.get("k") == b"x"


def test_what_swift_and_moto_do_is_found_out(
    bucket: str, s3_env: str, moto_quirks: QuirkProxy, moto_bucket: str
) -> None:
    swift = learn_store(store_at(s3_env, bucket))
    moto = learn_store(store_at(moto_quirks.endpoint, moto_bucket))
    for facts in (swift, moto):
        assert facts.create_on_put == "honoured"
        assert facts.create_on_complete in ("honoured", "ignored", "unsupported")
        seen = {facts.exact_ranges, facts.fresh_after_put, facts.fresh_after_delete, facts.fresh_after_overwrite}
        assert seen == {"yes"}
        assert facts.clock_skew_s is not None
        assert abs(facts.clock_skew_s) < 60
    assert store_at(s3_env, bucket).list("") == []
    assert store_at(s3_env, bucket).abort_uploads("", older_than_s=0.0) == 0

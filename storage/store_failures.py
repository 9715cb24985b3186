"""What a failure of a store's client means: asked for again, refused for good, or answered with an expired credential.

Client libraries raise their own roots (botocore, aiohttp, ssl, the operating system); they are told apart by HTTP
status, error code and class name, so that none of them has to be imported here.
"""

from __future__ import annotations

import errno
from typing import Any

from storage.errors import ObjectExists, ObjectMissing, StorageError, StoreRefused, StoreUnavailable

__all__ = ["error_code", "failure_of", "http_status", "is_stale_credential", "is_unsupported"]

_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
_STALE = {
    *("ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired", "RequestExpired"),
    "RequestTimeTooSkewed",
    # A HEAD has no body, so its answer to an expired token is a bare 400.
    "400",
}
# Answers in the 4xx range that the same request need not get again.
_PASSING_STATUS = {408, 409, 412, 416, 425, 429}
_PASSING_CODES = {
    *("RequestTimeout", "SlowDown", "Throttling", "ThrottlingException", "RequestThrottled", "TooManyRequests"),
    *("BadDigest", "XAmzContentSHA256Mismatch", "IncompleteBody", "InvalidDigest", "OperationAborted"),
    *("InvalidPart", "InvalidPartOrder", "NoSuchUpload", "ConditionalRequestConflict", "InternalError"),
}
_NEVER_RIGHT = {
    *("ParamValidationError", "PartialCredentialsError", "ProfileNotFound", "InvalidConfigError"),
    *("UnknownCredentialError", "InvalidEndpointConfigurationError", "UnsupportedS3ConfigurationError"),
}


def failure_of(operation: str, key: str, error: Exception, where: str, text: str, *, was_reached: bool) -> StorageError:
    """The error of this package that ``error`` is; ``text`` is its message, free of secrets.

    ``was_reached``: the store answered before, so that credentials which cannot be found now will be back.
    """
    name, code, status = type(error).__name__, error_code(error), http_status(error)
    if is_stale_credential(error):
        return StoreUnavailable(operation, key, f"{code}: {text}; credentials are read anew ({where})")
    if isinstance(error, PermissionError):
        return StoreRefused(operation, key, f"access denied: {text} ({where})")
    if isinstance(error, FileNotFoundError):
        if code == "NoSuchBucket":
            return StoreRefused(operation, key, f"the bucket does not exist ({where})")
        if code != "NoSuchUpload":
            return ObjectMissing(key, where)
    if isinstance(error, FileExistsError):
        return ObjectExists(key)
    reason = f"{' '.join(part for part in (name, code) if part)}: {text} ({where})"
    if name == "NoCredentialsError" and not was_reached:
        return StoreRefused(operation, key, f"access denied: {reason}")
    refused = 300 <= status < 500 and status not in _PASSING_STATUS and code not in _PASSING_CODES
    if refused or name in _NEVER_RIGHT:
        return StoreRefused(operation, key, reason)
    return StoreUnavailable(operation, key, reason)


def is_stale_credential(error: BaseException) -> bool:
    """Whether new credentials, or the same ones a moment later, may be accepted."""
    return error_code(error) in _STALE


def is_unsupported(error: BaseException) -> bool:
    """Whether a server or filesystem does not know the request, or the condition in it, at all."""
    if isinstance(error, NotImplementedError) or http_status(error) in (405, 501):
        return True
    if error_code(error) in _PASSING_CODES | _STALE or isinstance(error, PermissionError | FileNotFoundError):
        return False
    return isinstance(error, OSError) and error.errno in _UNSUPPORTED


def error_code(error: BaseException) -> str:
    """The code in a server's answer, or an empty string."""
    return str(_response(error).get("Error", {}).get("Code", ""))


def http_status(error: BaseException) -> int:
    """The HTTP status of a server's answer, or 0."""
    return int(_response(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _response(error: BaseException) -> dict[str, Any]:
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    return response if isinstance(response, dict) else {}

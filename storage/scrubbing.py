"""Takes secrets out of text before it becomes an error, a log line or a record.

It knows what is secret by name (environment, query parameters, URL user parts) and by shape (access key ids). It does
not look for secrets it has never been told of.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from urllib.parse import parse_qsl, unquote, urlsplit

__all__ = ["holds_secret", "scrubbed", "secrets_of_url"]

_MASK = "***"
_SHORTEST = 8
_SECRET_NAMES = re.compile(
    r"SECRET|TOKEN|PASSWORD|PASSWD|ACCESS_KEY|API_KEY|ACCOUNT_KEY|STORAGE_KEY|CONNECTION_STRING|SAS"
)
_CHAIN_LIMIT = 16
_PATTERNS = (
    re.compile(
        r"(?i)((?:x-amz-(?:signature|credential|security-token)|x-goog-signature|awsaccesskeyid|signature|sig|sas"
        r"|[a-z_-]*token|password|secret|[a-z_]*secret_key)=)[^&\s\"'<>)]+"
    ),
    re.compile(r"(://)[^/@\s\"'<>]+(?=@)"),
    re.compile(
        r"(?i)(<(?:AWSAccessKeyId|AccessKeyId|StringToSign|CanonicalRequest|SignatureProvided|Token-\d+)>)[^<]*"
    ),
    re.compile(r"(?i)((?:authorization|x-amz-security-token)[\"']?\s*[:=]\s*b?[\"']?)[^\"'}\n]+"),
    re.compile(r"()\b(?:AKIA|ASIA|AROA)[A-Z0-9]{12,}\b"),
)


def scrubbed(text: str, *secrets: str) -> str:
    """``text`` without ``secrets``, without the values of secret environment variables, without signed queries."""
    for secret in sorted({*secrets, *_from_environment()}, key=len, reverse=True):
        if secret:
            text = text.replace(secret, _MASK)
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\g<1>{_MASK}", text)
    return text


def secrets_of_url(url: str) -> tuple[str, ...]:
    """User name, password and query values of ``url``, as written and decoded."""
    parts = urlsplit(url)
    user, _, password = parts.netloc.rpartition("@")[0].partition(":")
    values = [user, password, *(value for _, value in parse_qsl(parts.query))]
    return tuple({form for value in values if value for form in (value, unquote(value))})


def holds_secret(error: BaseException, *secrets: str) -> bool:
    """Whether ``error``, or one it was raised from, would print a secret."""
    for _ in range(_CHAIN_LIMIT):
        text = f"{error}\n{error!r}"
        if scrubbed(text, *secrets) != text:
            return True
        following = error.__cause__ or error.__context__
        if following is None:
            return False
        error = following
    return True


def _from_environment() -> Iterator[str]:
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and _SECRET_NAMES.search(name):
            yield value

"""What must never be recorded: credentials in URLs, values under names that look like keys.

Covers names and URLs. A secret under a harmless name can't be told from any other text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "***"
_SECRET = re.compile(
    r"password|passwd|passphrase|secret|credential"
    r"|(^|[^a-z])(pass|pwd|token|key|api-?key|auth|cookie|bearer|sig|signature|dsn|netrc)([^a-z]|$)",
    re.IGNORECASE,
)
_SECRET_FILE = re.compile(r"(^\.env)|\.(pem|key|p12|pfx|jks|kdbx|asc)$|^id_(rsa|dsa|ecdsa|ed25519)")
_USER = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)(?!git@)[^/\s@\"']+@")
_QUERY = re.compile(r"([?&]([^=&\s\"']+)=)([^&\s\"'#]+)")
_ASSIGNED = re.compile(r"(?i)([\"']?([\w-]+)[\"']?\s*[:=]\s*[\"'])([^\"'\s]{6,})([\"'])")


def looks_secret(name: str) -> bool:
    """Whether a variable, option or setting of that name probably holds a secret."""
    return bool(_SECRET.search(re.sub(r"(?<=[a-z])(?=[A-Z])|_", "-", name)))


def is_secret_file(name: str) -> bool:
    """Whether a file of that name probably holds a secret."""
    return bool(_SECRET_FILE.search(name.lower())) or looks_secret(name.partition(".")[0] or name)


def without_credentials(text: str) -> str:
    """The text with the credentials of every URL in it replaced by `***`."""
    text = _USER.sub(rf"\1{HIDDEN}@", text)
    return _QUERY.sub(lambda m: m[1] + (HIDDEN if looks_secret(m[2]) else m[3]), text)


def without_secrets(text: str) -> str:
    """Source text without the credentials of URLs and without what is assigned to secret names."""
    text = without_credentials(text)
    return _ASSIGNED.sub(
        lambda m: m[1] + HIDDEN + m[4] if looks_secret(m[2]) else m[0],
        text,
    )


def redacted(value: Any) -> Any:
    """A value of JSON with the credentials of every URL in it replaced by `***`."""
    if isinstance(value, str):
        return without_credentials(value)
    if isinstance(value, Mapping):
        return {key: redacted(one) for key, one in value.items()}
    return [redacted(one) for one in value] if isinstance(value, list | tuple) else value


def redacted_command(arguments: Sequence[str]) -> list[str]:
    """A command's words without credentials and without the values of options named like keys."""
    found: list[str] = []
    hide = False
    for word in arguments:
        name, equals, _ = word.partition("=")
        if hide and not word.startswith("-"):
            found.append(HIDDEN)
        elif equals and looks_secret(name):
            found.append(f"{name}={HIDDEN}")
        else:
            found.append(without_credentials(word))
        hide = word.startswith("-") and not equals and looks_secret(word)
    return found

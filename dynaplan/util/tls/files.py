"""PEM files that TLS is made of, and what OpenSSL says of them."""

from __future__ import annotations

import ssl


class UnusableTls(ValueError):
    """Files that no TLS can be made of; the message is for the user."""


def check_readable(path: str, mark: str) -> None:
    """Raise UnusableTls unless the file can be read and holds what the mark ends the head of."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            text = file.read()
    except OSError as error:
        raise UnusableTls(f"{path}: {error.strerror}") from error
    if mark not in text:
        what = "private key" if "KEY" in mark else "certificate"
        raise UnusableTls(f"{path} holds no {what} in PEM form")


def said_of(error: ssl.SSLError) -> str:
    """Return OpenSSL's reason as people write it."""
    said = getattr(error, "verify_message", "") or (error.reason or "").replace("_", " ").lower()
    return str(said or error)

"""Which requests of web browsers are answered: a browser runs strangers' programs, and connects to loopback.

Any page that its owner has open may send requests to this machine. Three things could follow, and each has
one remedy, by headers that a page's script cannot set:

1. *It changes something without reading the answer* (CSRF): a form, ``fetch`` with a body of plain text, an
   image whose address is ``/unload``. A browser says where such a request comes from, in ``Origin`` or
   ``Sec-Fetch-Site``.
2. *It reads answers.* No script of another origin may, unless the answer names that origin (CORS).
3. *Its own name leads here for a moment* (DNS rebinding, as in CVE-2024-28224), so that to the browser both
   are one origin. Then ``Host`` has its name, and no name that can be registered leads to a loopback address.

An API key keeps all of that away, as no page has it; then the rule only says who may read answers.

| request | no key, on loopback | no key, elsewhere | with a key |
|---|---|---|---|
| no ``Origin``, no ``Sec-Fetch-Site``: curl, SDKs, proxies | answered | answered | answered |
| ``Host`` is a name that is not this machine's, nor allowed | 403 | answered | answered |
| ``Origin`` of the same host and port, or an allowed one | answered, readable | the same | the same |
| any other ``Origin`` | 403 | 403 | answered, unreadable |
| from another site without ``Origin``: an image, a script | 403 | 403 | answered, unreadable |
| the same, a link that a person follows, and nothing changes | answered | answered | answered |
| a GET that changes something, from another origin | 403 | 403 | answered |
| an ``Origin`` and a body that is not JSON, nor a form with a file | 415 | 415 | answered |

"Changes" is a request whose method is not GET or HEAD, or whose route says so. Elsewhere than on loopback,
and without a key, whoever reaches the port may use it, so a name is not checked there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from ipaddress import ip_address
from typing import NamedTuple, Protocol

LOCAL_DOMAINS = ("localhost", "local", "internal")
"""Top-level domains in which nobody can register a name: RFC 6761, RFC 6762, and ICANN's for private use."""

DEFAULT_ORIGINS = (
    *(
        f"{scheme}://{host}{port}"
        for scheme in ("http", "https")
        for host in ("localhost", "*.localhost", "127.0.0.1", "0.0.0.0", "[::1]")
        for port in ("", ":*")
    ),
    *("app://*", "file://*", "tauri://*", "vscode-webview://*", "vscode-file://*"),
)
"""Origins that are always allowed, at any port: pages from this machine, and desktop programs, as Ollama has
them in ``OLLAMA_ORIGINS``."""

ANY = "*"

BROWSER_HEADERS = frozenset({b"origin", b"sec-fetch-site"})
"""Headers that only browsers send; a request without them is another program's."""

_HOST = re.compile(r"(?:\[([^\[\]]+)\]|([^:@/\s\[\]]+))(?::\d*)?")
"""A header ``Host``: an IPv6 address in brackets, or a name or another address; then a port."""

_READABLE = {
    "Access-Control-Expose-Headers": "*",
    "Vary": "Origin",
}


class HeaderLookup(Protocol):
    """The headers of a request; names in any case."""

    def get(self, name: str, default: str, /) -> str:
        """Return the first value of a header."""
        ...


class BrowserRefusal(NamedTuple):
    """Why a browser's request is not answered: an HTTP status, a short code, and what to do about it."""

    status: int
    code: str
    message: str


class HostNames:
    """The names that are accepted in a header ``Host``: this machine's (``own``), and those of ``allowed``.

    A numeric address is always accepted: it cannot be rebound.
    """

    def __init__(self, own: Iterable[str], allowed: Iterable[str] = ()) -> None:
        self._names = {name.lower() for name in own} - {""}
        self._allowed = _pattern(allowed)

    def has(self, host: str) -> bool:
        """Tell whether the value of a header ``Host`` is accepted, whatever its port."""
        name = host_name(host)
        is_local = name.rpartition(".")[2] in LOCAL_DOMAINS or name in self._names
        return bool(name) and (is_local or _is_address(name) or bool(self._allowed.fullmatch(name)))


class BrowserPolicy:
    """The rule for one server. ``names`` is None where ``Host`` is not checked.

    ``origins`` are those that are allowed beside ``DEFAULT_ORIGINS``: ``https://chat.example``; ``*`` stands
    for any part, alone for every origin.
    """

    def __init__(
        self, names: HostNames | None, origins: Iterable[str] = (), *, has_key: bool = False
    ) -> None:
        self._has_key = has_key
        self._has_host = lru_cache(maxsize=256)(names.has) if names and not has_key else None
        self._is_allowed = lru_cache(maxsize=256)(_pattern([*DEFAULT_ORIGINS, *origins]).fullmatch)

    def readable_by(self, headers: HeaderLookup) -> str:
        """Return the origin whose scripts may read the answer; empty where there is none."""
        origin = headers.get("Origin", "")
        return origin if origin and self._is_ours(origin, headers) else ""

    def refuse(self, headers: HeaderLookup, *, is_change: bool) -> BrowserRefusal | None:
        """Return why the request is not answered; None for one that is.

        ``is_change``: it changes something, so that a mere link from another site may not lead to it.
        """
        if self._has_key:
            return None
        if refusal := self.host_refusal(headers):
            return refusal
        origin, site = headers.get("Origin", ""), headers.get("Sec-Fetch-Site", "")
        if not (origin or site):
            return None
        if origin:
            if not self._is_ours(origin, headers):
                return _foreign_origin(origin)
            if _has_body(headers) and not _is_structured(headers.get("Content-Type", "")):
                message = "A request of a web page has a body of the type application/json, and says so."
                return BrowserRefusal(415, "unsupported_media_type", message)
            return None
        is_link = site == "cross-site" and headers.get("Sec-Fetch-Mode", "") == "navigate"
        if site in ("same-origin", "none") or (not is_change and (site == "same-site" or is_link)):
            return None
        return _foreign_origin("another site")

    def host_refusal(self, headers: HeaderLookup) -> BrowserRefusal | None:
        """Return why the request's ``Host``, such as a rebound DNS name, is refused; None for a good one.

        It is the only check that requests of programs other than browsers have to pass, too.
        """
        if self._has_host is None:
            return None
        host = headers.get("Host", "")
        return _foreign_host(host) if host and not self._has_host(host) else None

    def _is_ours(self, origin: str, headers: HeaderLookup) -> bool:
        return bool(self._is_allowed(origin.lower())) or _is_same(origin, headers.get("Host", ""))


def readable_headers(origin: str) -> dict[str, str]:
    """Return the headers by which a browser lets scripts of the origin read an answer."""
    return {"Access-Control-Allow-Origin": origin, **_READABLE}


def preflight_headers(headers: HeaderLookup) -> Mapping[str, str]:
    """Return the headers that answer a preflight: whatever method and headers the script wants to send."""
    wanted = headers.get("Access-Control-Request-Headers", "")
    return {
        "Access-Control-Allow-Methods": "GET, HEAD, POST, DELETE, OPTIONS",
        "Access-Control-Allow-Headers": wanted or "Content-Type, Authorization",
        "Access-Control-Max-Age": "600",
    }


def is_preflight(method: str, headers: HeaderLookup) -> bool:
    """Tell whether the request is a browser's CORS preflight: the question whether it may send another."""
    return method == "OPTIONS" and bool(
        headers.get("Origin", "") and headers.get("Access-Control-Request-Method", "")
    )


def host_name(host: str) -> str:
    """Return the name or address in a header ``Host``, in lower case; empty for one that is malformed."""
    found = _HOST.fullmatch(host)
    return (found[1] or found[2]).lower().rstrip(".") if found else ""


def _is_address(name: str) -> bool:
    try:
        ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def _is_same(origin: str, host: str) -> bool:
    """Tell whether an origin is the very host and port that were asked."""
    scheme, _, netloc = origin.lower().partition("://")
    return scheme in ("http", "https") and netloc == host.lower() != ""


def _has_body(headers: HeaderLookup) -> bool:
    is_empty = headers.get("Content-Length", "0").strip() == "0"
    return not is_empty or bool(headers.get("Transfer-Encoding", ""))


def _is_structured(content_type: str) -> bool:
    """Tell whether the type is JSON, or that of a form with files, as for sounds."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind in ("application/json", "multipart/form-data") or kind.endswith("+json")


def _pattern(patterns: Iterable[str]) -> re.Pattern[str]:
    """Return the expression of names or origins in which ``*`` stands for any part, alone for all of it."""
    parts = [".*" if each == ANY else _expression(each) for each in patterns]
    return re.compile("|".join(parts) or "(?!)")


def _expression(pattern: str) -> str:
    head, separator, rest = pattern.lower().rpartition("://")
    return re.escape(head + separator) + "[^/]*".join(map(re.escape, rest.rstrip("/").split(ANY)))


def _foreign_host(host: str) -> BrowserRefusal:
    name = host_name(host)[:100] or "?"
    message = (
        f"{name!r} is no name of this machine, so a web page may have made it lead here. If it is yours: "
        f"--Frontend.allowed-hosts='[\"{name}\"]', or an API key (DYNAPLAN_API_KEY), lets it in."
    )
    return BrowserRefusal(403, "foreign_host", message)


def _foreign_origin(origin: str) -> BrowserRefusal:
    shown = repr(origin[:100]) if "://" in origin or origin == "null" else origin
    message = f"A web page of {shown} may not use this service without an API key."
    if "://" in origin:
        message += f" If it is yours: --Frontend.allowed-origins='[\"{origin[:100]}\"]' lets it in."
    return BrowserRefusal(403, "foreign_origin", message)

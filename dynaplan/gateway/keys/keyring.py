"""The keys of a file, as the frontend knows them: whose a request is, whether it may be, and what it uses.

| a request | is answered |
|---|---|
| without a key, with one that is unknown or revoked, with one that has expired | 401 |
| for a model that its key does not have, or on a path that is for ``admin`` keys | 403 |
| beyond a limit of its key | 429, with the time after which it is within it |

The file is read again when it changes. One that cannot be read, or is wrong, changes nothing, and the log
says why. A key that is revoked lets nobody in from then on; what it has in flight ends in peace.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path

from dynaplan.config.keys import expires_unix_s, hash_of, read_keys_file
from dynaplan.config.settings.keys import KeySettings
from dynaplan.gateway import timing
from dynaplan.gateway.keys.counts import KeyCounts
from dynaplan.gateway.keys.limits import WINDOW_S, LimitUse, MinuteUsage, Used, rate_headers
from dynaplan.gateway.keys.usage import KeyUsage
from dynaplan.gateway.openai_api import ApiError, Call
from dynaplan.gateway.routing.key_turns import Turn
from dynaplan.util.errors import UserError

log = logging.getLogger(__name__)

NO_HEADERS: Mapping[str, str] = {}


class Keyring:
    """The holders of keys, by hash. The constructor raises ConfigError for a file that cannot be used."""

    def __init__(self, path: Path, counts: KeyCounts, usage: KeyUsage) -> None:
        self._path = path
        self._counts = counts
        self.usage = usage
        self._holders: dict[str, KeyHolder] = {}
        self.unix_s = counts.unix_s
        self.seen: dict[str, KeyHolder] = {}
        """Holders by the header ``Bearer KEY``, once the key was sent: a hash costs more than all else."""
        self._stamp = self._file_stamp()
        self._take_over(read_keys_file(path))

    def find(self, key: bytes) -> KeyHolder | None:
        """Return the holder of a key; raises ApiError (401) for one that has expired.

        The time of the look-up tells nothing of use: it depends on hashes, and nobody can choose a key by its
        hash.
        """
        header = f"Bearer {key.decode('utf-8', 'surrogateescape')}"
        holder = self.seen.get(header)
        if holder is None:
            holder = self._holders.get(hash_of(key))
            if holder is None:
                return None
            self.seen[header] = holder
        if holder.expires_unix_s <= self.unix_s():
            raise unauthorized(f"The API key of {holder.name} has expired", "expired_api_key", OWNER_GIVES)
        return holder

    def limits_used(self) -> dict[str, list[LimitUse]]:
        """Return what is used of the limits of each key that has any, by its name."""
        holders = {each.name: each.limits_used() for each in self._holders.values()}
        return {name: limits for name, limits in holders.items() if limits}

    def close(self) -> None:
        """Write what was used, and let other frontends forget this one."""
        self.usage.write_files()
        self._counts.close()

    async def follow(self) -> None:
        """Read the file when it has changed, and look for other frontends, for ever."""
        while True:
            await asyncio.sleep(timing.KEYS_POLL_S)
            self._counts.look_for_others()
            if (stamp := self._file_stamp()) != self._stamp:
                self._stamp = stamp
                self.reload()

    def reload(self) -> None:
        """Take over the file as it is now."""
        try:
            keys = read_keys_file(self._path)
        except UserError as error:
            log.error("the keys stay as they were: %s. %s", error, error.hint)
            return
        self._take_over(keys)
        log.info("%d keys are in %s now", len(keys), self._path)

    def _take_over(self, keys: dict[str, KeySettings]) -> None:
        self._holders = {each.hash: self.holder(each) for each in keys.values()}
        self.seen = {}

    def holder(self, settings: KeySettings) -> KeyHolder:
        """Return the holder of a key that is not in the file."""
        return KeyHolder(settings, self._counts, self.usage)

    def _file_stamp(self) -> tuple[int, ...]:
        try:
            status = os.stat(self._path)
        except OSError:
            return ()
        return status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode


class KeyHolder:
    """Somebody with a key: what he may do, and what he uses of his limits."""

    def __init__(self, settings: KeySettings, counts: KeyCounts, usage: KeyUsage) -> None:
        self.settings = settings
        self.usage = usage
        self.name = settings.name
        self.weight = settings.weight
        self.expires_unix_s = expires_unix_s(settings)
        self.models = frozenset(settings.models or ())
        """Names of models that he may use; empty for all."""
        self._counts = counts
        per_minute = ("requests", settings.requests_per_minute), ("tokens", settings.tokens_per_minute)
        self._per_minute = {kind: limit for kind, limit in per_minute if limit}
        self._most_in_flight = settings.concurrency or math.inf
        self._most_requests = settings.requests_per_minute or math.inf
        self._most_tokens = settings.tokens_per_minute or math.inf
        self.limited_counts = counts if self._per_minute or settings.concurrency else None
        """Where he is counted for his limits; None without any."""

    def may_use(self, names: Collection[str]) -> bool:
        """Tell whether a model with these names is one of his."""
        return not self.models or not self.models.isdisjoint(names)

    def check_model(self, asked: str, names: Collection[str]) -> None:
        """Raise ApiError (403) unless the model, which was asked for by one of its names, is one of his."""
        if asked not in self.models and not self.may_use(names):
            own = ", ".join(sorted(self.models))
            raise _forbidden(
                f"The API key of {self.name} is not for the model {asked!r}, but for: {own}",
                "model_not_allowed",
            )

    def check_admin(self, path: str) -> None:
        """Raise ApiError (403) unless the key is one that moves models and sees engines."""
        if not self.settings.admin:
            raise _forbidden(f"{path} is for keys with `admin: true`, and {self.name}'s is none", "not_admin")

    def check_limits(self, call: Call) -> Mapping[str, str]:
        """Raise ApiError (429) for a request beyond a limit; return what its answer tells of the limits."""
        counts, prompt_tokens = self.limited_counts, call.prompt_tokens
        if not counts:
            return NO_HEADERS
        used = counts.used(self.name)
        in_flight, requests, requests_before, tokens, tokens_before = used
        if (
            in_flight >= self._most_in_flight
            or requests + requests_before >= self._most_requests
            or tokens + tokens_before + prompt_tokens > self._most_tokens
        ):
            self._check_windows(used, prompt_tokens)
        elapsed_s = counts.unix_s() % WINDOW_S
        return rate_headers(self._per_minute, used, elapsed_s, requests=1, tokens=prompt_tokens)

    def _check_windows(self, used: Used, prompt_tokens: int) -> None:
        """Raise ApiError (429) unless one more request with that prompt is within the sliding limits."""
        if used.in_flight >= self._most_in_flight:
            raise self._too_much(f"{used.in_flight} requests at a time", "concurrency", 1.0, used)
        for kind, window in self._windows(used).items():
            if wait_s := window.wait_s(1 if kind == "requests" else prompt_tokens):
                raise self._too_much(f"{window.limit} {kind} per minute", kind, wait_s, used)

    def limits_used(self) -> list[LimitUse]:
        """Return what is used of each of his limits."""
        if not self.limited_counts:
            return []
        used, most = self._counts.used(self.name), self.settings.concurrency
        found = [LimitUse("at a time", used.in_flight, most)] if most else []
        for kind, window in self._windows(used).items():
            found.append(LimitUse(f"{kind}/min", math.ceil(window.used), window.limit))
        return found

    def _windows(self, used: Used) -> dict[str, MinuteUsage]:
        elapsed_s = self._counts.unix_s() % WINDOW_S
        amounts = {
            "requests": (used.requests_now, used.requests_before),
            "tokens": (used.tokens_now, used.tokens_before),
        }
        return {
            kind: MinuteUsage(limit, *amounts[kind], elapsed_s) for kind, limit in self._per_minute.items()
        }

    def _too_much(self, limit: str, kind: str, wait_s: float, used: Used) -> ApiError:
        message = f"The API key of {self.name} is limited to {limit}"
        if wait_s == math.inf:
            message += ", and this prompt alone has more"
            headers = {"X-Should-Retry": "false"}  # OpenAI's clients try again after any 429 but such a one
        else:
            message += f"; try again in {math.ceil(wait_s)} s"
            headers = {"Retry-After": str(math.ceil(wait_s)), "retry-after-ms": str(math.ceil(1000 * wait_s))}
        headers |= rate_headers(self._per_minute, used, self._counts.unix_s() % WINDOW_S)
        return ApiError(
            429,
            message,
            kind=kind,
            code="rate_limit_exceeded",
            metric="overload",
            headers=headers,
        )


class KeyUse:
    """One accepted request of a key, counted from now until ``end``."""

    def __init__(self, holder: KeyHolder, call: Call) -> None:
        self.holder = holder
        self.turn: Turn | None = None
        self._model = call.model
        self._prompt_tokens = call.prompt_tokens
        if counts := holder.limited_counts:
            counts.add(holder.name, in_flight=1, requests=1, tokens=call.prompt_tokens)

    def end(self, prompt_tokens: int, answer_tokens: int, *, is_error: bool) -> None:
        """Count the answer, and what the prompt had beside its estimate."""
        holder = self.holder
        if counts := holder.limited_counts:
            further_tokens = prompt_tokens + answer_tokens - self._prompt_tokens
            counts.add(holder.name, in_flight=-1, tokens=further_tokens)
        if self.turn:
            self.turn.settle(prompt_tokens, answer_tokens)
        status = "error" if is_error else "success"
        holder.usage.add(holder.name, self._model, status, prompt_tokens, answer_tokens)


OWNER_GIVES = "a key that its owner gave you: `dynaplan keys add NAME` makes one"


def unauthorized(fault: str, code: str, expected: str) -> ApiError:
    """Return the 401 for a request that bears no key of this service; it says nothing of any key."""
    return ApiError(
        401,
        f"{fault}. Send 'Authorization: Bearer <key>' or 'x-api-key: <key>', with {expected}.",
        kind="authentication_error",
        code=code,
        metric="validation",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _forbidden(message: str, code: str) -> ApiError:
    return ApiError(403, message, kind="permission_error", code=code, metric="validation")

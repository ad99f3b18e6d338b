"""The errors that dynaplan raises on purpose: each says whose fault it is and whether a retry helps.

::

    DynaplanError               .hint: what to do next
    |- UserError                shown without a traceback, exit code 2
    |  |- GraphError            the graph cannot be loaded or is inconsistent
    |  |- ConfigError           unknown key, wrong value, contradiction between keys
    |  |  |- SeveralErrors      all that is wrong with one input
    |  |- CapacityError         the graph does not fit the GPUs
    |  |- DeploymentError       nothing is running here, or something already is
    |  |- ClusterNotFound       an object of the cluster is not there
    |  |- ClusterForbidden      the Kubernetes API server does not allow it: no right, or no credential
    |- TemporaryError           a retry after .delay_s may succeed
    |  |- ProgramEnded          a worker's command ended by itself before it answered
    |  |- StoreUnavailable      the key-value store does not answer
    |  |- QueueUnavailable      the work queue does not answer
    |  |- LockNotFree           a lock did not become free in time
    |  |- LockLost              a lock was lost while it was in use
    |  |- ArbiterBusy           the circus arbiter refuses or does not answer
    |  |- DeadlineExceeded      a call was not answered within its time
    |  |- StatefileUnwritable   the statefile cannot be written now: full disk, read-only, no permission
    |  |- ClusterUnavailable    the Kubernetes API server does not answer, or cannot now
    |  |- ClusterConflict       an object of the cluster was changed or made by somebody else meanwhile
    |  |- ClusterExpired        a watch is older than what the API server remembers: list again
    |- PermanentError           a retry is useless
       |- IllegalTransition     a lifecycle was asked for an impossible move
       |- RequestRefused        an engine refuses a request that is wrong in itself
       |- StatefileCorrupt      the statefile is not a document of ours
       |- WorkerStartFailed     a worker can never start
       |- ClusterRefused        the Kubernetes API server does not take an object
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager


class DynaplanError(Exception):
    """Base of every error raised on purpose; ``hint`` says what to do next."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\n  {self.hint}" if self.hint else message


class UserError(DynaplanError):
    """The input is at fault: shown without a traceback, exit code 2."""


class GraphError(UserError):
    """The graph cannot be loaded, or contradicts itself."""


class ConfigError(UserError):
    """An unknown key, a wrong value, or keys that contradict each other."""


class SeveralErrors(ConfigError):
    """All that is wrong with one input, each error with its own hint."""

    def __init__(self, errors: Sequence[UserError]) -> None:
        super().__init__("\nError: ".join(map(str, errors)))
        self.errors = tuple(errors)


class Faults:
    """The errors of one input, gathered while it is checked, so that its author sees all of them at once.

    ``places`` are the parts of the input, by the names that ``gathering`` was given, that have an error: what
    is checked later may leave them out.
    """

    def __init__(self) -> None:
        self._errors: dict[str, UserError] = {}
        self.places: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._errors)

    @contextmanager
    def gathering(self, place: str = "", *, prefix: str = "") -> Iterator[None]:
        """Keep a UserError of the block, with ``prefix`` before its words, and go on behind the block."""
        try:
            yield
        except UserError as error:
            self.places.add(place)
            for each in error.errors if isinstance(error, SeveralErrors) else (error,):
                kept = type(each)(f"{prefix}{each.args[0]}", hint=each.hint) if prefix else each
                self._errors.setdefault(str(kept), kept)

    def raise_all(self) -> None:
        """Raise what was gathered: nothing, the one error, or SeveralErrors."""
        errors = list(self._errors.values())
        if errors:
            raise errors[0] if len(errors) == 1 else SeveralErrors(errors)


@contextmanager
def all_faults() -> Iterator[Faults]:
    """Gather the errors of the block, and raise them together at its end."""
    faults = Faults()
    with faults.gathering():
        yield faults
    faults.raise_all()


class CapacityError(UserError):
    """The graph does not fit the GPUs of this box."""


class DeploymentError(UserError):
    """No deployment is running where one is needed, or one is where none may be."""


class ClusterNotFound(UserError):
    """An object of the cluster is not there, or its kind is not."""


class ClusterForbidden(UserError):
    """The Kubernetes API server does not allow a request: a right, or a valid credential, is missing."""


class TemporaryError(DynaplanError):
    """An error that a retry after ``delay_s`` seconds may cure."""

    def __init__(self, message: str, *, hint: str = "", delay_s: float = 0.5) -> None:
        super().__init__(message, hint=hint)
        self.delay_s = delay_s


class ProgramEnded(TemporaryError):
    """The command of a worker ended by itself before it answered: most often it will again."""


class StoreUnavailable(TemporaryError):
    """The key-value store did not answer."""


class QueueUnavailable(TemporaryError):
    """The work queue or the messaging server did not answer."""


class LockNotFree(TemporaryError):
    """A lock did not become free in the time that its caller gave."""


class LockLost(TemporaryError):
    """A lock was lost while it was in use: another may have held it since."""


class ArbiterBusy(TemporaryError):
    """The circus arbiter refused a command because another one runs, or did not answer."""


class DeadlineExceeded(TemporaryError):
    """A call was not answered completely within its time, and was cancelled."""


class StatefileUnwritable(TemporaryError):
    """The statefile could not be written: full disk, read-only, no permission. Serving goes on without it."""


class ClusterUnavailable(TemporaryError):
    """The Kubernetes API server did not answer, or answered that it cannot now."""


class ClusterConflict(TemporaryError):
    """An object of the cluster was changed, or made, by somebody else meanwhile."""


class ClusterExpired(TemporaryError):
    """A watch began at a version that the Kubernetes API server has forgotten: list again."""


class PermanentError(DynaplanError):
    """An error that no retry cures."""


class IllegalTransition(PermanentError):
    """A lifecycle was asked for a move that its table does not have."""


class RequestRefused(PermanentError):
    """An engine refuses a request that is wrong in itself, with that HTTP ``status``: the client's fault."""

    def __init__(self, message: str, *, hint: str = "", status: int = 400) -> None:
        super().__init__(message, hint=hint)
        self.status = status


class StatefileCorrupt(PermanentError):
    """The statefile cannot be read as a document of ours."""


class WorkerStartFailed(PermanentError):
    """A worker can never start: a supervisor must not try again."""


class ClusterRefused(PermanentError):
    """The Kubernetes API server does not take an object: it is wrong in itself."""


def nearest(name: str, names: Iterable[str], *, cutoff: float = 0.6, most: int = 0) -> str:
    """Return a hint: ``Did you mean X?`` when one of the names is near, else a list of them.

    ``most`` > 0 bounds the list, which begins with the likest ones then.

    ``cutoff`` is the least similarity, difflib's ratio, of a name that is near.
    """
    from difflib import SequenceMatcher, get_close_matches

    known = sorted(set(names))
    by_lower = {name.lower(): name for name in known}
    near = get_close_matches(name.lower(), by_lower, 1, cutoff=cutoff)
    if near:
        return f"Did you mean {by_lower[near[0]]!r}?"
    if 0 < most < len(known):
        known.sort(key=lambda other: -SequenceMatcher(None, name.lower(), other.lower()).ratio())
        return f"Known: {', '.join(known[:most])} and {len(known) - most} others."
    return f"Known: {', '.join(known)}." if known else ""

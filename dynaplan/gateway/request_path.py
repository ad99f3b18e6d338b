"""The path of a request that a worker computes, from its acceptance to the end of its answer.

**Stations.** A request is *accepted*, or refused before it has cost a worker anything. Then it is
*attempted*:

    book a worker -> remote prefill, where that is better -> reserve a slot, where the engine asks for one
    -> open the engine's answer -> hold it back until its first token -> stream it to the client

**The rule.** Nothing is sent to the client before the first token. Until then any other worker can take the
request over, at the cost of time. After it, only a worker that is asked for the rest of the answer can
(``migration``).

**Cases.** Each attempt ends with one ``Outcome``, and each outcome has one decision. Below, the number of a
case stands where it is found, and where it is decided.

    1. *Not accepted*: key, waiting requests, body, model, addresses, length of the prompt, the key's limits.
       The error is the answer.
    2. *Impossible*: no worker is there in time, the engine has no such field, or no worker may compute the
       prompt. The error is the answer, or the last event of a stream that has begun.
    3. *Refused*: the worker has certainly not begun with the request. Retry elsewhere; it costs nothing.
    4. *Asleep*: the engine fell asleep over the request, or its worker stands still (``stalled_workers``).
       Retry elsewhere; nobody's fault, but the hand-off may be gone.
    5. *Died* before the first token. Retry elsewhere, without the hand-off, which works only once. The third
       death is the answer 502, and a request that is known to kill workers is answered 500
       (``poison_requests``).
    6. *StreamBroken*: the worker died within the stream, and another one can go on. The next attempt asks for
       the rest. A retry of that one costs no death: its limit is ``migration-limit``.
    7. *Answered*: whole; or with an engine's error; or cut where no other worker can go on, which ends with
       an error event and a connection that is closed in the middle of the chunked encoding.
    8. *The client left*: everything is cancelled, and the engine sees its connection close.

The client's side is ``client.Client``, the engine's ``upstream.Upstream``: no other type of HTTP is here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from dynaplan.config.settings.frontend import FrontendSettings
from dynaplan.engines import registry
from dynaplan.engines.api_rules import EngineApi
from dynaplan.gateway import engine_answers
from dynaplan.gateway.admission import Admission, Place
from dynaplan.gateway.client import Client, WholeAnswer
from dynaplan.gateway.engine_answers import NO_USAGE, Failure, Usage, count_tokens
from dynaplan.gateway.error_forms import as_event, error_event, has_openai_form, translated
from dynaplan.gateway.forms import read_form
from dynaplan.gateway.frontend_models import NO_FILTERS, FrontendModel, FrontendModels
from dynaplan.gateway.keys.keyring import KeyUse
from dynaplan.gateway.migration import MigratableStream, UnreadPages
from dynaplan.gateway.openai_api import (
    NO_BLOCKS,
    UNKNOWN_URL,
    ApiError,
    ApiPath,
    Call,
    check_and_loosen_tools,
    check_fields,
    estimate_tokens,
    internal_error,
    needs_local_prefill,
    nested_too_deep,
    no_such_path,
    no_worker,
    out_of_descriptors,
    worker_failed,
)
from dynaplan.gateway.passing_stream import PassingStream
from dynaplan.gateway.passthrough import COUNT_TOKENS
from dynaplan.gateway.poison_requests import PoisonRequests, Suspect
from dynaplan.gateway.prefill.remote_prefill import HandOff
from dynaplan.gateway.reports import CANCELLED, Ending, Reports, RequestReport
from dynaplan.gateway.request_bodies import BodyBudget, BodyReader, BodyShare
from dynaplan.gateway.routing.key_turns import Turn
from dynaplan.gateway.routing.reservation import Reservations
from dynaplan.gateway.routing.sleeping_workers import EngineAsleep, SleepingWorkers
from dynaplan.gateway.routing.whole_answers import WholeAnswers
from dynaplan.gateway.routing.worker_router import Booking
from dynaplan.gateway.upstream import REFUSALS, EngineAnswer, Upstream, WorkerDied, WorkerRefused
from dynaplan.http.request_ids import attempt_id
from dynaplan.http.trace import REQUEST_ID
from dynaplan.store.instances import Instance
from dynaplan.util.descriptors import descriptor_limit, is_exhausted

log = logging.getLogger(__name__)

MAX_DEATHS = 3
"""Workers that may die over one request before it is answered 502: the request itself may be the cause."""

MAX_BEGINNING_BYTES = 64 * 1024
"""Bytes of a stream that are held back at most while no token is found in them."""

NO_BOUNDS = EngineApi()

_DONE_EVENT = b"data: [DONE]\n\n"
_JSON = "application/json"
_ERROR_TYPES = {429: "overload", 501: "not_implemented"}
_FORWARDED_HEADERS = ("Retry-After",)


class Accepted(Struct, frozen=True):
    """An accepted request: what is asked of which model, its place among those that wait, its report."""

    client: Client
    call: Call
    model: FrontendModel
    place: Place
    report: RequestReport


class Answered(Struct, frozen=True):
    """The client has its stream, or is to get the ``whole`` answer; ``error_type`` is the metrics' label."""

    error_type: str = ""
    whole: WholeAnswer | None = None


@dataclass(frozen=True)
class Refused:
    """The worker has not begun with the request."""

    reason: str


@dataclass(frozen=True)
class Asleep:
    """The engine sleeps, or fell asleep or stood still before the first token."""

    reason: str


@dataclass(frozen=True)
class Died:
    """The worker failed before its first token."""

    reason: str


@dataclass(frozen=True)
class StreamBroken:
    """The worker failed mid-stream; ``continuation`` is the request that resumes it on another worker."""

    reason: str
    continuation: Call


Outcome = Answered | Refused | Asleep | Died | StreamBroken


class _StreamBreak(Exception):
    """Ends an attempt as ``StreamBroken``."""

    def __init__(self, reason: str, continuation: Call) -> None:
        super().__init__(reason)
        self.continuation = continuation


class RequestPath:
    """Answers every request that workers compute; one for each frontend."""

    def __init__(
        self,
        settings: FrontendSettings,
        admission: Admission,
        models: FrontendModels,
        upstream: Upstream,
        reservations: Reservations,
        sleeping: SleepingWorkers,
        reports: Reports,
    ) -> None:
        self.settings = settings
        self.admission = admission
        self.models = models
        self.upstream = upstream
        self.reservations = reservations
        self.sleeping = sleeping
        self.reports = reports
        self.now_s = asyncio.get_running_loop().time
        self.poison = PoisonRequests(self.now_s)
        self.whole_answers = WholeAnswers(self.now_s)
        self.pages = UnreadPages()
        self.in_flight = 0
        self.bodies = BodyBudget(settings.max_bodies_bytes)
        self.reader = BodyReader(settings.max_body_bytes)
        self._apis: dict[str, EngineApi] = {}

    async def close(self) -> None:
        """End the process that reads large bodies."""
        await self.reader.close()

    async def answer(self, client: Client, endpoint: ApiPath) -> None:
        """Answer the request; raises ApiError as long as nothing has been sent."""
        self.in_flight += 1
        share, progress = BodyShare(self.bodies), None
        error_type = CANCELLED  # case 8, unless something else is known
        try:
            progress = RequestProgress(self, await self._accept(client, endpoint, share))
            answered = await progress.run()
            error_type = answered.error_type or CANCELLED
            await client.finish(answered.whole)
            error_type = answered.error_type
        except ApiError as error:
            error_type = error.metric
            raise
        except ConnectionError:  # case 8
            pass
        except RecursionError:
            error_type = "validation"
            raise nested_too_deep() from None
        except Exception as error:
            error_type = "internal"
            log.exception("a request failed")
            raise internal_error() from error
        finally:
            if progress:
                progress.end(error_type)
            share.close()
            self.in_flight -= 1

    async def _accept(self, client: Client, endpoint: ApiPath, share: BodyShare) -> Accepted:
        name, holder = "unknown", None
        try:
            if self.admission.asks_for_key:
                holder = self.admission.check_key(client.headers)
            self.admission.check_room(holder)
            body = await client.read_body(
                share,
                max_bytes=self.settings.max_body_bytes,
                timeout_s=self.settings.body_timeout_s,
            )
            if endpoint.is_form:
                call = read_form(endpoint, client.content_type, body)
            else:
                call = await self.reader.read(endpoint, body)
            model = self.models.find(call.model)
            if holder and holder.models:
                holder.check_model(call.model, model.names)
            call = model.addressed(call)
            name = call.model
            self.admission.check_call(call, model.router.context_tokens)
            if holder:
                client.rate_headers = holder.check_limits(call)
            place = self.admission.enter_room(holder)
        except ApiError as error:  # case 1
            self.reports.refuse(client, endpoint, error.metric, name, holder)
            raise
        use = KeyUse(holder, call) if holder else None
        return Accepted(client, call, model, place, RequestReport(self.reports, client, call, use))

    def api_of(self, instance: Instance) -> EngineApi:
        """Return the API of the instance's engine, as its card names it."""
        name = instance.card.get("engine")
        if not isinstance(name, str):
            return NO_BOUNDS
        if name not in self._apis:
            try:
                kind = registry.find_engine(name)
                self._apis[name] = kind.api if kind else NO_BOUNDS
            except OSError as error:  # the engine's module is imported here, once, in 10 ms
                if is_exhausted(error):
                    raise out_of_descriptors(descriptor_limit()) from None
                raise
        return self._apis[name]


class RequestProgress:
    """One request between its attempts: what the next one is to ask for, and with what.

    ``call`` is the client's request, or the rest of its answer once ``stream`` has begun.
    """

    def __init__(self, path: RequestPath, request: Accepted) -> None:
        self.path = path
        self.request = request
        self.model = request.model
        self.call = request.call
        self.hand_off: HandOff | None = None
        self.stream: MigratableStream | None = None
        self.has_begun = False
        self.deaths = 0
        self._prompt_tokens = request.call.prompt_tokens
        self._blocks = NO_BLOCKS
        self._last: Attempt | None = None
        self._is_prefill_placed = not request.call.can_be_remote
        self._deadline_s = path.now_s() + path.settings.worker_wait_s

    async def run(self) -> Answered:
        """Attempt the request until it is answered; raises ApiError while nothing has been sent."""
        try:
            while True:
                # The verdict over a request is by the client's body, whatever this attempt asks for.
                has_begun = self.stream is not None
                suspect = await self.path.poison.admit(self.request.call, has_begun=has_begun)
                try:
                    outcome = await self._attempt(suspect)
                finally:
                    suspect.close()
                if isinstance(outcome, Answered):  # case 7
                    is_late = outcome.whole is not None and self.has_begun
                    return await self._as_event(outcome) if is_late else outcome
                self._decide(outcome)
        except ApiError as error:  # case 2, or the last of case 5
            if self.call.endpoint.path == COUNT_TOKENS and error.document["code"] == UNKNOWN_URL:
                return Answered(whole=WholeAnswer.json({"input_tokens": estimate_tokens(self.call)}))
            if not self.has_begun:
                raise
            await self.request.client.break_off(error_event(self.call.endpoint.path, error))
            return Answered(error.metric)
        finally:
            if self.hand_off:
                self.release_hand_off()
            if self.stream:
                self.stream.close()

    def begin_stream(self) -> None:
        """Begin the client's stream, once."""
        if not self.has_begun:
            self.has_begun = True
            self.request.client.start_stream()

    async def _comment(self, words: str) -> None:
        """Send a comment, which is no part of the answer, to a client with a stream."""
        self.begin_stream()
        await self.request.client.write(f": {words}\n\n".encode())

    async def _as_event(self, answered: Answered) -> Answered:
        """Send a whole answer as events of the stream that has begun; an error breaks the stream off."""
        assert answered.whole
        if answered.error_type:
            await self.request.client.break_off(as_event(self.call.endpoint.path, answered.whole.body))
        else:
            await self.request.client.write(engine_answers.as_stream(answered.whole.body))
        return replace(answered, whole=None)

    def _decide(self, outcome: Refused | Asleep | Died | StreamBroken) -> None:
        """Prepare the next attempt; raises ApiError (502) when too many workers died over the request."""
        assert self._last
        instance = self._last.instance
        self.model.router.avoid(instance)
        if isinstance(outcome, Refused):  # case 3
            log.debug("%s refused a request: %s", instance.worker, outcome.reason)
            return
        log.info("%s failed over a request: %s", instance.worker, outcome.reason)
        self.release_hand_off()
        self._is_prefill_placed = not (self._last.requires_remote_prefill and self.request.call.can_be_remote)
        self._renew_deadline()
        if isinstance(outcome, StreamBroken):  # case 6
            self.call = outcome.continuation
            self.request.report.record.count_migration()
        elif isinstance(outcome, Died) and self.stream is None:  # case 5; case 4 costs no death
            self.deaths += 1
            if self.deaths == MAX_DEATHS:
                raise worker_failed(f"{self.deaths} workers died over this request: {outcome.reason}")

    async def _attempt(self, suspect: Suspect) -> Outcome:
        router, is_in_turn = self.model.router, self.model.queue or self.request.report.use
        booking = await (self._book_in_turn() if is_in_turn else router.book(self.call, self._deadline_s))
        try:
            if booking.blocks is not NO_BLOCKS:
                self._note_tokens(booking)
            api = self.path.api_of(booking.instance)
            filters = self.model.filters
            owners = () if filters is NO_FILTERS else filters.set_in(self.call.document)
            self.call = check_and_loosen_tools(self.call, api, booking.instance.card)
            check_fields(self.call, api, owners)
            await self._place_prefill(booking)
            attempt = self._last = Attempt(self, booking, api, suspect)
            if self.call.is_stream:
                return await attempt.run()
            is_prefilled = attempt.hand_off is not None
            # No token of it is seen: the booking grows by an estimate.
            with self.path.whole_answers.waiting(booking, is_prefilled=is_prefilled) as waited_for:
                outcome = await attempt.run()
                waited_for.output_tokens = attempt.usage().output_tokens or 0
                return outcome
        finally:
            booking.close()

    async def _book_in_turn(self) -> Booking:
        """Book a worker, in the turn of the request's key beside those of others, and of the model."""
        model, call, use = self.model, self.call, self.request.report.use
        turn, turns = None, model.router.turns
        if use and turns:
            holder = use.holder
            turn = use.turn = use.turn or Turn(
                holder.name, holder.weight, call.prompt_tokens, call.is_stream, turns
            )
        try:
            if model.queue is None:
                return await model.router.book(call, self._deadline_s, turn=turn)
            comment = self._comment if call.is_stream else None
            return await model.queue.book(model.router, call, comment, turn)
        finally:
            if turn and turn.is_waiting:
                turn.leave()

    def _note_tokens(self, booking: Booking) -> None:
        """Note the prompt's blocks; the number of its tokens is exact where the router knows them."""
        blocks = booking.blocks
        if blocks.prompt_tokens not in (0, self.call.prompt_tokens):
            self.call = replace(self.call, prompt_tokens=blocks.prompt_tokens)
        if self.stream is None:
            self._blocks, self._prompt_tokens = blocks, self.call.prompt_tokens

    async def _place_prefill(self, booking: Booking) -> None:
        """Have the prompt computed remotely if that is better, or if the worker cannot compute it itself."""
        is_needed = bool(booking.instance.card.get("requires_remote_prefill"))
        if not self._is_prefill_placed:
            self._is_prefill_placed = True
            if self.model.prefill.is_on:
                self.hand_off = await self._prefill_remotely(booking, is_needed=is_needed)
                self._renew_deadline()
            else:
                self.path.reports.metrics.count_prefill(self.call.model, "local")
        elif self.hand_off and not self.model.prefill.can_reach(booking.instance):
            self.release_hand_off()
        if is_needed and not self.request.call.can_be_remote:  # case 2
            raise needs_local_prefill()
        if is_needed and self.hand_off is None:  # case 2
            raise no_worker("No prefill worker has taken the prompt, and no decode worker can. Try again.")

    async def _prefill_remotely(self, booking: Booking, *, is_needed: bool) -> HandOff | None:
        return await self.model.prefill.hand_off(
            self.call,
            booking.prefix_hit_rate,
            is_needed=is_needed,
            taker=booking.instance,
            blocks=booking.blocks,
            trace=self._trace,
            running=booking.book.in_flight,
        )

    def _trace(self) -> Mapping[str, str]:
        """Return the headers that a remote prefill is sent with: the client's trace and the request id."""
        client = self.request.client
        return {**client.trace_headers(), REQUEST_ID: attempt_id(client.request_id)}

    def release_hand_off(self) -> None:
        """Release the hand-off: an engine has taken it over, or none will."""
        if self.hand_off:
            self.hand_off.release()
            self.hand_off = None

    def _renew_deadline(self) -> None:
        """Give the next wait for a worker its whole time."""
        self._deadline_s = self.path.now_s() + self.path.settings.worker_wait_s

    def end(self, error_type: str) -> None:
        """Leave the waiting room, and report what is known of the ended request. Call it once."""
        self.request.place.leave()
        last, self._last = self._last, None  # it leads back here: work for the garbage collector
        worker, usage = (last.instance.worker, last.usage()) if last else ("", NO_USAGE)
        self.request.report.end(Ending(error_type, self._prompt_tokens, usage, worker, self._blocks))


class Attempt:
    """One attempt to have the request answered by the booked worker; ``run`` it once."""

    def __init__(self, progress: RequestProgress, booking: Booking, api: EngineApi, suspect: Suspect) -> None:
        self._progress = progress
        self._path = progress.path
        self._model = progress.model
        self._request = progress.request
        self._call = progress.call
        self._booking = booking
        self._api = api
        self._suspect = suspect
        self._end_bytes = b""
        self.instance = booking.instance
        self.requires_remote_prefill = bool(booking.instance.card.get("requires_remote_prefill"))
        self.hand_off = progress.hand_off

    async def run(self) -> Outcome:
        """Send the request, and its answer to the client; raises ApiError when no other attempt can help."""
        request_id = attempt_id(self._request.client.request_id)
        self._suspect.sent_to(self.instance)
        fields = self.hand_off.fields if self.hand_off else {}
        reserves = self.instance.card.get("reserves") and self._call.endpoint.streams
        exchange = self._exchange_in_slot if reserves else self._exchange
        try:
            answered = await exchange(fields, request_id)
        except WorkerRefused as error:
            return Refused(str(error))  # case 3
        except EngineAsleep as error:
            return Asleep(str(error))  # case 4
        except WorkerDied as error:
            self._note_death(error)
            return Died(str(error))  # case 5
        except _StreamBreak as error:
            return StreamBroken(str(error), error.continuation)  # case 6
        if not answered.error_type:
            self._suspect.mark_answered()
        return answered

    def usage(self) -> Usage:
        """Return the usage that the answer states, and of a remote prompt what the prefill worker had cached.

        To the decode worker's engine all that it took over is cached.
        """
        usage = engine_answers.find_usage(self._end_bytes)
        return replace(usage, cached_tokens=self.hand_off.cached_tokens) if self.hand_off else usage

    async def _exchange_in_slot(self, fields: Mapping[str, Any], request_id: str) -> Answered:
        """Exchange request and answer in a slot that the worker reserves."""
        if self._model.router.is_asleep(self.instance):  # since it was booked
            raise EngineAsleep("its engine sleeps")
        async with self._path.reservations.reserve(self.instance, request_id, fields or None) as reserved:
            self._progress.release_hand_off()  # the worker has taken it over, or never will
            return await self._exchange(reserved, request_id)

    async def _exchange(self, fields: Mapping[str, Any], request_id: str) -> Answered:
        answer = None
        try:
            with self._path.sleeping.while_awake(self.instance):
                answer = await self._path.upstream.post(
                    self.instance.openai_url + self._call.endpoint.path,
                    self._call.body_with(fields),
                    request_id,
                    content_type=self._call.content_type,
                    is_kept=self.instance.card.get("keep_alive", True),
                    trace=self._request.client.trace_headers(),
                    refusals=() if self._api.is_unknown else REFUSALS,
                )
                if answer.status >= 500 and (
                    error := engine_answers.corrected_error(self._api, await answer.read_all())
                ):
                    raise error
                if answer.status == 500 and not self._api.is_unknown:
                    await self._judge_500(answer)
                is_document = (answer.header("Content-Type") or "").startswith(_JSON)
                if answer.status != 200 or not self._call.is_stream or is_document:
                    return await self._answer_whole(answer)
                first = await self._read_first_token(answer)
            self._booking.finish_prefill()
            return await self._stream(answer, first)
        finally:
            if answer:
                answer.close()  # gives a connection back whose answer was read to its end

    async def _judge_500(self, answer: EngineAnswer) -> None:
        """Raise WorkerDied when the engine is dead behind its server, or another attempt may end better."""
        if self._api.death_marks:
            message = (await answer.read_all()).decode(errors="replace")
            if self._api.reports_death(message):
                raise WorkerDied("its engine is dead", is_connection_lost=True)
        own_id, ids = self.instance.instance_id, {each.instance_id for each in self._model.router.instances}
        if self._progress.deaths == 0 and (self.hand_off or ids - {own_id}):
            raise WorkerDied("status 500")  # as engines answer while they shut down
        if own_id not in ids:
            raise WorkerDied("status 500 of a worker that leaves")

    async def _answer_whole(self, answer: EngineAnswer) -> Answered:
        """Take over an answer that is no stream, whatever its status."""
        body = await answer.read_all()
        if self._progress.stream:  # case 2: this worker does not go on with the stream
            reason = body.decode(errors="replace")[:200]
            raise worker_failed(
                f"{self.instance.worker} did not go on with the answer ({answer.status}): {reason}"
            )
        if not self._api.is_unknown:
            self._check_whole(answer.status, body)
        self._note_answering()
        self._end_bytes = body
        headers = {name: value for name in _FORWARDED_HEADERS if (value := answer.header(name)) is not None}
        headers["Content-Type"] = answer.header("Content-Type") or _JSON
        if answer.status >= 400 and not self._api.is_unknown:
            body = engine_answers.rewrite_context_error(answer.status, body)
            body = translated(self._call.endpoint.path, answer.status, body)
        return Answered(_error_type(answer.status), WholeAnswer(answer.status, headers, body))

    def _check_whole(self, status: int, body: bytes) -> None:
        """Raise WorkerDied for an aborted answer, and ApiError for a path that the engine lacks."""
        if status == 200 and engine_answers.is_aborted(body):
            raise WorkerDied("it aborted the request")
        if self._call.endpoint.inputs and status in (404, 405) and not has_openai_form(body):
            raise no_such_path(self._call.endpoint.path)

    async def _read_first_token(self, answer: EngineAnswer) -> bytes:
        """Read the stream up to its first token; return the events.

        Raises WorkerDied when it ends or fails before, and ApiError when the engine reports that the request
        itself is at fault.
        """
        beginning = b""
        while events := await answer.read_lines():
            if failure := engine_answers.find_failure(events):
                if failure.is_clients_fault:
                    raise failure.to_api_error()
                raise self._death_by(failure)
            beginning += events
            if count_tokens(self._call.endpoint, events) or len(beginning) > MAX_BEGINNING_BYTES:
                return beginning
        if not (self._api.is_unknown or engine_answers.is_ended(self._call.endpoint, beginning)):
            raise WorkerDied("its stream ended before the first token")
        return beginning

    async def _stream(self, answer: EngineAnswer, events: bytes) -> Answered:
        """Pass the stream on, from its first ``events`` to its end or its failure."""
        stream = self._start_stream()
        record, endpoint = self._request.report.record, self._call.endpoint
        write_now = self._request.client.write_now
        passing = PassingStream(endpoint, write_now, stream.partial, record, self._booking)
        pass_on = None if stream.is_spliced else passing.pass_on
        answer.connection.is_movable = lambda: not stream.find_obstacle(record.output_tokens, self._api)
        death: WorkerDied | None = None
        try:
            while events:
                if pass_on is None or not pass_on(events):
                    if failure := engine_answers.find_failure(events):
                        return await self._fail(stream, failure)
                    sent = await stream.write(events)
                    passing.record_sent(sent, count_tokens(endpoint, sent))
                events = await answer.read_lines(pass_on)
        except WorkerDied as error:
            death = error
            self._note_death(error)
        self._end_bytes = passing.last_events()
        is_whole = self._api.is_unknown and death is None
        if is_whole or engine_answers.is_ended(endpoint, self._end_bytes):
            return Answered()
        return await self._cut(stream, death or WorkerDied("its stream ended early"))

    def _start_stream(self) -> MigratableStream:
        """Return the client's stream, which the first attempt with a first token starts."""
        progress, settings = self._progress, self._path.settings
        if self.hand_off and progress.stream is None:
            self.hand_off.on_first_token()
        self._note_answering()
        if progress.stream is None:
            client = self._request.client
            progress.begin_stream()
            progress.stream = MigratableStream(
                client, self._call, self._api, settings.migration_limit, self._path.pages
            )
        return progress.stream

    async def _fail(self, stream: MigratableStream, failure: Failure) -> Answered:
        """End the stream by an error that the engine has reported in the middle of it.

        Another worker can go on when this one has aborted the answer, as one does that must end, or is dead.
        """
        sent = await stream.write(failure.good)
        self._request.report.record.observe(count_tokens(self._call.endpoint, sent))
        death = self._death_by(failure)
        self._note_death(death)
        path = self._call.endpoint.path
        event = failure.body and as_event(path, translated(path, failure.status, failure.body))
        if death.is_connection_lost or not event:
            return await self._cut(stream, death, event)
        await self._request.client.break_off(event)
        return Answered(_error_type(failure.status))

    async def _cut(self, stream: MigratableStream, death: WorkerDied, event: bytes = b"") -> Answered:
        """End a stream whose worker died within it, unless another one can go on: then raise _StreamBreak.

        ``event`` is the engine's error event, if it sent one.
        """
        client, tokens = self._request.client, self._request.report.record.output_tokens
        if stream.is_complete():
            await client.write(_DONE_EVENT)
            return Answered()
        obstacle = stream.find_obstacle(tokens, self._api)
        if not obstacle:
            raise _StreamBreak(str(death), stream.migrate(tokens, self._api))
        error = worker_failed(f"The worker died over this request: {death}; {obstacle}")
        await client.break_off(event or error_event(self._call.endpoint.path, error))
        return Answered("internal")

    def _death_by(self, failure: Failure) -> WorkerDied:
        return WorkerDied(failure.message, is_connection_lost=self._api.reports_death(failure.message))

    def _note_death(self, death: WorkerDied) -> None:
        """Count the worker's death against the request, if its connection was lost."""
        if death.is_connection_lost:
            self._suspect.worker_died()

    def _note_answering(self) -> None:
        """Note that the answer has begun: the request no longer waits, and the engine has the hand-off."""
        self._request.place.leave()
        self._request.report.record.begin_answer()
        if self._progress.hand_off:
            self._progress.release_hand_off()
        self._suspect.begin_answer()


def _error_type(status: int) -> str:
    """Return the ``error_type`` label for the HTTP status of a worker's answer."""
    if status < 400:
        return ""
    if status in _ERROR_TYPES:
        return _ERROR_TYPES[status]
    return "validation" if status < 500 else "internal"

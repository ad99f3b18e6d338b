"""The path of a request that a worker computes, from its acceptance to the end of its answer.

**Stations.** A request is *accepted*, or refused before it has cost a worker anything. Then it is
*attempted*:

    book a worker -> remote prefill, where that is better -> reserve a slot, where the engine asks for one
    -> open the engine's answer -> hold it back until its first token -> stream it to the client

**The rule.** Nothing is sent to the client before the first token. Until then any other worker can take the
request over, at the cost of time. After it, only a worker that is asked for the rest of the answer can
(``migration``).

**Cases.** An attempt ends with an answer, or raises one of ``FAILURES``, on each of which ``_decide`` has one
decision. Below, the number of a case stands where it is found, and where it is decided.

    1. *Not accepted*: key, waiting requests, body, model, addresses, length of the prompt, the key's limits.
       The error is the answer.
    2. *Impossible*: no worker is there in time, the engine has no such field, or no worker may compute the
       prompt. The error is the answer, or the last event of a stream that has begun.
    3. *WorkerRefused*: the worker has certainly not begun with the request. Retry elsewhere; it costs
       nothing.
    4. *EngineAsleep*: the engine fell asleep over the request, or its worker stands still
       (``stalled_workers``). Retry elsewhere; nobody's fault, but the hand-off may be gone.
    5. *WorkerDied* before the first token. Retry elsewhere, without the hand-off, which works only once. The
       third death is the answer 502, and a request that is known to kill workers is answered 500
       (``poison_requests``).
    6. *StreamBroken*: the worker died within the stream, and another one can go on. The next attempt asks for
       the rest, up to ``migration-limit`` times. The deaths of case 5 are counted anew for each.
    7. *Answered*: whole; or with an engine's error; or cut where no other worker can go on, which ends with
       an error event and a connection that is closed in the middle of the chunked encoding.
    8. *The client left*: everything is cancelled, and the engine sees its connection close.

**One waiter.** Once a request is sent, its stream passes without its task: ``PassingStream`` is called for
what arrives, holds it back, starts the client's stream by ``begin_answer``, and passes the rest on. The task
waits in ``Upstream.post`` for what is left to it: as a rule the end.

The client's side is ``client.Client``, the engine's ``upstream.Upstream``: no other type of HTTP is here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
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
from dynaplan.gateway.error_forms import as_event, error_answer, error_event, has_openai_form, translated
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
from dynaplan.gateway.routing.sleeping_workers import EngineAsleep, SleepingWorkers, WhileAwake
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

NO_BOUNDS = EngineApi()

_DONE_EVENT = b"data: [DONE]\n\n"
_JSON = "application/json"
_ERROR_TYPES = {429: "overload", 501: "not_implemented"}
_FORWARDED_HEADERS = ("Retry-After",)


class Answered(Struct, frozen=True):
    """The client has its stream, or is to get the ``whole`` answer; ``error_type`` is the metrics' label."""

    error_type: str = ""
    whole: WholeAnswer | None = None


class StreamBroken(Exception):
    """The worker failed mid-stream; ``continuation`` is the request that resumes it on another worker."""

    def __init__(self, reason: str, continuation: Call) -> None:
        super().__init__(reason)
        self.continuation = continuation


FAILURES = WorkerRefused, EngineAsleep, WorkerDied, StreamBroken
"""How an attempt fails that another one may follow: cases 3 to 6."""


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

    async def answer(self, client: Client, endpoint: ApiPath) -> WholeAnswer | None:
        """Answer the request; return the error that has kept it from that, None where there was none."""
        self.in_flight += 1
        share, progress = BodyShare(self.bodies), None
        error_type = CANCELLED  # case 8, unless something else is known
        try:
            progress = await self._accept(client, endpoint, share)
            answered = await progress.run()
            error_type = answered.error_type or CANCELLED
            await client.finish(answered.whole)
            error_type = answered.error_type
            return None
        except ConnectionError:  # case 8
            return None
        except Exception as error:
            fault = _as_api_error(error)
            error_type = fault.metric
            if not isinstance(error, ApiError | RecursionError):
                log.exception("a request failed")
            return error_answer(endpoint.path, fault)
        finally:
            if progress:
                progress.end(error_type)
            share.close()
            self.in_flight -= 1

    async def _accept(self, client: Client, endpoint: ApiPath, share: BodyShare) -> RequestProgress:
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
        except BaseException as error:  # case 1, or 8
            self.reports.refuse(client, endpoint, _error_type_of(error), name, holder)
            raise
        use = KeyUse(holder, call) if holder else None
        report = RequestReport(self.reports, client, call, use)
        return RequestProgress(self, client, call, model, place, report)

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
    """One accepted request between its attempts: what the next one is to ask for, and with what.

    ``call`` is what the next attempt asks for: ``asked``, the client's request, as engines so far needed it,
    or the rest of the answer after a ``StreamBroken``.
    ``place`` is its own among the requests that wait.
    """

    __slots__ = (
        *("_blocks", "_deadline_s", "_is_prefill_placed", "_last", "_prompt_tokens", "asked", "call"),
        *("client", "deaths", "hand_off", "has_begun", "model", "path", "place", "report", "stream"),
    )

    def __init__(
        self,
        path: RequestPath,
        client: Client,
        asked: Call,
        model: FrontendModel,
        place: Place,
        report: RequestReport,
    ) -> None:
        self.path = path
        self.client = client
        self.asked = self.call = asked
        self.model = model
        self.place = place
        self.report = report
        self.hand_off: HandOff | None = None
        self.stream: MigratableStream | None = None
        self.has_begun = False
        self.deaths = 0
        self._prompt_tokens = asked.prompt_tokens
        self._blocks = NO_BLOCKS
        self._last: Attempt | None = None
        self._is_prefill_placed = not asked.can_be_remote
        self._deadline_s = path.now_s() + path.settings.worker_wait_s

    async def run(self) -> Answered:
        """Attempt the request until it is answered; raises ApiError while nothing has been sent."""
        poison = self.path.poison
        try:
            while True:
                # The verdict over a request is by the client's body, whatever this attempt asks for.
                suspect = await poison.admit(self.asked, has_begun=self.stream is not None)
                try:
                    answered = await self._attempt(suspect)
                except FAILURES as failure:
                    self._decide(failure, suspect)
                else:  # case 7
                    if not answered.error_type:
                        poison.clear(self.asked)
                    is_late = answered.whole is not None and self.has_begun
                    return await self._as_event(answered) if is_late else answered
                finally:
                    suspect.close()
        except ApiError as error:  # case 2, or the last of case 5
            if self.call.endpoint.path == COUNT_TOKENS and error.document["code"] == UNKNOWN_URL:
                return Answered(whole=WholeAnswer.json({"input_tokens": estimate_tokens(self.call)}))
            if not self.has_begun:
                raise
            await self.client.break_off(error_event(self.call.endpoint.path, error))
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
            self.client.start_stream()

    async def _comment(self, words: str) -> None:
        """Send a comment, which is no part of the answer, to a client with a stream."""
        self.begin_stream()
        await self.client.write(f": {words}\n\n".encode())

    async def _as_event(self, answered: Answered) -> Answered:
        """Send a whole answer as events of the stream that has begun; an error breaks the stream off."""
        assert answered.whole
        if answered.error_type:
            await self.client.break_off(as_event(self.call.endpoint.path, answered.whole.body))
        else:
            await self.client.write(engine_answers.as_stream(answered.whole.body))
        return replace(answered, whole=None)

    def _decide(self, failure: Exception, suspect: Suspect) -> None:
        """Prepare the next attempt; raises ApiError (502) when too many workers died over the request."""
        assert self._last
        instance = self._last.instance
        self.model.router.avoid(instance)
        if isinstance(failure, WorkerRefused):  # case 3
            log.debug("%s refused a request: %s", instance.worker, failure)
            return
        log.info("%s failed over a request: %s", instance.worker, failure)
        self.release_hand_off()
        needed_hand_off = bool(instance.card.get("requires_remote_prefill"))
        self._is_prefill_placed = not (needed_hand_off and self.asked.can_be_remote)
        self._renew_deadline()
        if isinstance(failure, StreamBroken):  # case 6
            self.call, self.deaths = failure.continuation, 0
            self.report.record.count_migration()
        elif isinstance(failure, WorkerDied):  # case 5; case 4 costs no death
            note_death(suspect, failure)
            self.deaths += 1
            if self.deaths == MAX_DEATHS:
                raise worker_failed(f"{self.deaths} workers died over this request: {failure}")

    async def _attempt(self, suspect: Suspect) -> Answered:
        """Have one worker answer; raises one of ``FAILURES``, or ApiError when no other one can help."""
        router, is_in_turn = self.model.router, self.model.queue or self.report.use
        booking = await (self._book_in_turn() if is_in_turn else router.book(self.call, self._deadline_s))
        try:
            api = await self._prepare(booking)
            attempt = self._last = Attempt(self, booking, api, suspect)
            if self.call.is_stream:
                return await attempt.run()
            is_prefilled = attempt.hand_off is not None
            # No token of it is seen: the booking grows by an estimate.
            with self.path.whole_answers.waiting(booking, is_prefilled=is_prefilled) as waited_for:
                answered = await attempt.run()
                waited_for.output_tokens = attempt.usage().output_tokens or 0
                return answered
        finally:
            booking.close()

    async def _prepare(self, booking: Booking) -> EngineApi:
        """Have the prompt computed, and the call as the booked worker's engine takes it; return its API."""
        if booking.blocks is not NO_BLOCKS:
            self._note_tokens(booking)
        api = self.path.api_of(booking.instance)
        filters = self.model.filters
        owners = () if filters is NO_FILTERS else filters.set_in(self.call.document)
        self.call = check_and_loosen_tools(self.call, api, booking.instance.card)
        check_fields(self.call, api, owners)
        await self._place_prefill(booking)
        return api

    async def _book_in_turn(self) -> Booking:
        """Book a worker, in the turn of the request's key beside those of others, and of the model."""
        model, call, use = self.model, self.call, self.report.use
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
        if is_needed and not self.asked.can_be_remote:  # case 2
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
        client = self.client
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
        self.place.leave()
        last, self._last = self._last, None  # it leads back here: work for the garbage collector
        worker, usage = (last.instance.worker, last.usage()) if last else ("", NO_USAGE)
        self.report.end(Ending(error_type, self._prompt_tokens, usage, worker, self._blocks))


class Attempt:
    """One attempt to have the request answered by the booked worker; ``run`` it once."""

    __slots__ = (
        *("_api", "_awake", "_booking", "_call", "_client", "_end_bytes", "_passing", "_path", "_progress"),
        *("_suspect", "hand_off", "instance"),
    )

    def __init__(self, progress: RequestProgress, booking: Booking, api: EngineApi, suspect: Suspect) -> None:
        self._progress = progress
        self._path = progress.path
        self._client = progress.client
        self._call = progress.call
        self._booking = booking
        self._api = api
        self._suspect = suspect
        self._end_bytes = b""
        self._awake: WhileAwake | None = None
        self.instance = booking.instance
        self.hand_off = progress.hand_off
        self._passing = PassingStream(
            progress.call.endpoint,
            progress.client.connection,
            progress.report.record,
            booking,
            self,
            is_spliced=progress.stream is not None,
        )

    def run(self) -> Awaitable[Answered]:
        """Send the request, and its answer to the client; raises one of ``FAILURES``, or ApiError."""
        self._suspect.sent_to(self.instance)
        fields = self.hand_off.fields if self.hand_off else {}
        if self.instance.card.get("reserves") and self._call.endpoint.streams:
            return self._exchange_in_slot(fields)
        return self._exchange(fields)

    def usage(self) -> Usage:
        """Return the usage that the answer states, and of a remote prompt what the prefill worker had cached.

        To the decode worker's engine all that it took over is cached.
        """
        usage = engine_answers.find_usage(self._end_bytes)
        return replace(usage, cached_tokens=self.hand_off.cached_tokens) if self.hand_off else usage

    async def _exchange_in_slot(self, fields: Mapping[str, Any]) -> Answered:
        """Exchange request and answer in a slot that the worker reserves."""
        if self._progress.model.router.is_asleep(self.instance):  # since it was booked
            raise EngineAsleep("its engine sleeps")
        request_id = attempt_id(self._client.request_id)
        async with self._path.reservations.reserve(self.instance, request_id, fields or None) as reserved:
            self._progress.release_hand_off()  # the worker has taken it over, or never will
            return await self._exchange(reserved)

    async def _exchange(self, fields: Mapping[str, Any]) -> Answered:
        answer = None
        try:
            with self._path.sleeping.while_awake(self.instance) as self._awake:
                answer = await self._path.upstream.post(
                    self.instance.openai_url + self._call.endpoint.path,
                    self._call.body_with(fields),
                    attempt_id(self._client.request_id),
                    content_type=self._call.content_type,
                    is_kept=self.instance.card.get("keep_alive", True),
                    trace=self._client.trace_headers(),
                    refusals=() if self._api.is_unknown else REFUSALS,
                    sink=self._passing if self._call.is_stream else None,
                )
                if answer.status >= 500:
                    await self._judge_failure(answer)
                if answer.connection.is_stream and self._call.is_stream:
                    return await self._stream(answer)
                return await self._answer_whole(answer)
        finally:
            self._passing.drop_owner()
            if answer:
                answer.close()  # gives a connection back whose answer was read to its end

    async def _judge_failure(self, answer: EngineAnswer) -> None:
        """Raise what is answered in place of an engine's error, or WorkerDied if another attempt may help."""
        if error := engine_answers.corrected_error(self._api, await answer.read_all()):
            raise error
        if answer.status != 500 or self._api.is_unknown:
            return
        if self._api.death_marks:
            message = (await answer.read_all()).decode(errors="replace")
            if self._api.reports_death(message):
                raise WorkerDied("its engine is dead", is_connection_lost=True)
        instances = self._progress.model.router.instances
        own_id, ids = self.instance.instance_id, {each.instance_id for each in instances}
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

    async def _stream(self, answer: EngineAnswer) -> Answered:
        """Handle what the passing stream leaves to this task, until the stream's end or its failure."""
        passing, endpoint = self._passing, self._call.endpoint
        death: WorkerDied | None = None
        try:
            while events := await answer.read_lines(passing):
                is_last = answer.connection.is_complete and engine_answers.is_ended(endpoint, events)
                if not (events := passing.pass_on(events, is_last=is_last)):
                    continue
                if failure := engine_answers.find_failure(events):
                    return await self._fail(failure)
                if events := passing.hold_or_release(events, count_tokens(endpoint, events)):
                    await self._send(events)
        except WorkerDied as error:
            if not passing.has_begun:
                raise
            death = error
            note_death(self._suspect, death)
        self._end_bytes = passing.last_events() or passing.held
        is_ended = engine_answers.is_ended(endpoint, self._end_bytes)
        if not passing.has_begun:
            if not (is_ended or self._api.is_unknown):
                raise WorkerDied("its stream ended before the first token")
            await self._send(passing.begin())
        if is_ended or (self._api.is_unknown and death is None):
            return Answered()
        return await self._cut(death or WorkerDied("its stream ended early"))

    def begin_answer(self) -> None:
        """End the waiting and the prefill, at the first token; begin the client's stream or go on with it."""
        progress, settings = self._progress, self._path.settings
        assert self._awake
        self._awake.stop_watching()
        self._booking.finish_prefill()
        if self.hand_off and progress.stream is None:
            self.hand_off.on_first_token()
        self._note_answering()
        if progress.stream is None:
            progress.begin_stream()
            progress.stream = MigratableStream(
                self._client, self._call, self._api, settings.migration_limit, self._path.pages
            )
        self._passing.partial = progress.stream.partial

    def is_movable(self) -> bool:
        """Tell whether another worker can go on with the answer."""
        stream, tokens = self._progress.stream, self._progress.report.record.output_tokens
        return stream is not None and not stream.find_obstacle(tokens, self._api)

    async def _send(self, events: bytes) -> None:
        """Send events of the stream, which may be spliced; wait for a client that is slow."""
        assert self._progress.stream
        sent = await self._progress.stream.write(events)
        self._passing.record_sent(sent, count_tokens(self._call.endpoint, sent))

    async def _fail(self, failure: Failure) -> Answered:
        """End the stream by an error that the engine has reported in it; before the first token raise it.

        Another worker can go on when this one has aborted the answer, as one does that must end, or is dead.
        """
        death, path = self._death_by(failure), self._call.endpoint.path
        if not self._passing.has_begun:
            raise failure.to_api_error() if failure.is_clients_fault else death
        await self._send(failure.good)
        note_death(self._suspect, death)
        event = failure.body and as_event(path, translated(path, failure.status, failure.body))
        if death.is_connection_lost or not event:
            return await self._cut(death, event)
        await self._client.break_off(event)
        return Answered(_error_type(failure.status))

    async def _cut(self, death: WorkerDied, event: bytes = b"") -> Answered:
        """End a stream whose worker died within it, unless another one can go on: then raise StreamBroken.

        ``event`` is the engine's error event, if it sent one.
        """
        stream, tokens = self._progress.stream, self._progress.report.record.output_tokens
        assert stream
        if stream.is_complete():
            await self._client.write(_DONE_EVENT)
            return Answered()
        obstacle = stream.find_obstacle(tokens, self._api)
        if not obstacle:
            raise StreamBroken(str(death), stream.migrate(tokens, self._api))
        error = worker_failed(f"The worker died over this request: {death}; {obstacle}")
        await self._client.break_off(event or error_event(self._call.endpoint.path, error))
        return Answered("internal")

    def _death_by(self, failure: Failure) -> WorkerDied:
        return WorkerDied(failure.message, is_connection_lost=self._api.reports_death(failure.message))

    def _note_answering(self) -> None:
        """Note that the answer has begun: the request no longer waits, and the engine has the hand-off."""
        self._progress.place.leave()
        self._progress.report.record.begin_answer()
        if self._progress.hand_off:
            self._progress.release_hand_off()
        self._suspect.begin_answer()


def note_death(suspect: Suspect, death: WorkerDied) -> None:
    """Count the worker's death against the request, if its connection was lost."""
    if death.is_connection_lost:
        suspect.worker_died()


def _error_type_of(error: BaseException) -> str:
    """Return the ``error_type`` label for what has kept a request from being accepted."""
    if isinstance(error, Exception) and not isinstance(error, ConnectionError):
        return _as_api_error(error).metric
    return CANCELLED


def _as_api_error(error: Exception) -> ApiError:
    """Return the error that the client is answered with."""
    if isinstance(error, ApiError):
        return error
    return nested_too_deep() if isinstance(error, RecursionError) else internal_error()


def _error_type(status: int) -> str:
    """Return the ``error_type`` label for the HTTP status of a worker's answer."""
    if status < 400:
        return ""
    if status in _ERROR_TYPES:
        return _ERROR_TYPES[status]
    return "validation" if status < 500 else "internal"

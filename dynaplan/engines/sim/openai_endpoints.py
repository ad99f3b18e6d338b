"""The HTTP side of the simulated engine: reads requests, has them computed, writes their answers."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dynaplan.engines.sim.api import (
    AnswerText,
    CompletionRequest,
    Rendering,
    error_document,
    models_document,
    read_request,
)
from dynaplan.engines.sim.extra_apis import (
    ResponseRendering,
    chat_of_response,
    detokenize,
    embedding_prompts,
    embeddings_document,
    tokenize_response,
)
from dynaplan.engines.timing_model.engine_model import EngineRequest, RequestState
from dynaplan.http.messages import BodyTooLarge, InvalidBody, Request, Response
from dynaplan.http.routes import Route
from dynaplan.util.errors import PermanentError, RequestRefused, UserError

if TYPE_CHECKING:
    from dynaplan.engines.sim.engine import SimEngine
    from dynaplan.engines.sim.kv_transfer import KvFetcher

log = logging.getLogger(__name__)


class LiveAnswer:
    """One request on its way: the tokens that the model has emitted, and a waiter for more."""

    __slots__ = ("failure", "is_finished", "is_streamed", "ready_tokens", "request", "waiter")

    def __init__(self, request: EngineRequest, *, is_streamed: bool) -> None:
        self.request = request
        self.is_streamed = is_streamed
        self.ready_tokens = 0
        self.is_finished = False
        self.failure: Exception | None = None
        self.waiter: asyncio.Future[None] | None = None

    async def progress(self, seen_tokens: int) -> None:
        """Wait for more tokens than ``seen_tokens`` if it is streamed, else for all.

        Raises the answer's failure.
        """
        while not self.is_finished and not (self.is_streamed and self.ready_tokens > seen_tokens):
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        if self.failure is not None:
            raise self.failure

    def advance(self, tokens: int) -> None:
        self.ready_tokens = tokens
        self.is_finished = self.request.state >= RequestState.HELD
        if self.is_finished or self.is_streamed:
            self._wake()

    def fail(self, failure: Exception) -> None:
        self.failure = failure
        self.is_finished = True
        self._wake()

    def _wake(self) -> None:
        waiter, self.waiter = self.waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


JSON_HEADERS = {"Content-Type": "application/json"}
_Work = Callable[[Request, Any], Awaitable[Response | None]]

STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


@dataclass(frozen=True, slots=True)
class _Part:
    asked: CompletionRequest
    answer: LiveAnswer
    rendering: Rendering


class SimEndpoints:
    """Answers the paths of the API with what the engine computes, and the fetcher brings."""

    def __init__(
        self, engine: SimEngine, fetcher: KvFetcher, seed: int, model: str, context_tokens: int
    ) -> None:
        self._engine = engine
        self._fetcher = fetcher
        self._text = AnswerText(seed)
        self._model = model
        self._context_tokens = context_tokens

    def routes(self) -> Sequence[Route]:
        work: Mapping[str, _Work] = {
            "/v1/chat/completions": self._chat_completions,
            "/v1/completions": self._completions,
            "/v1/responses": self._responses,
            "/v1/embeddings": self._embeddings,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }
        routes = [Route("POST", path, partial(_answer, each)) for path, each in work.items()]
        return (*routes, Route("GET", "/v1/models", self._models, is_work=False))

    def read(self, body: object, *, is_chat: bool) -> CompletionRequest:
        """Check the body of a completion or a chat; raises UserError saying what is wrong with it."""
        return read_request(body, is_chat=is_chat, model=self._model, context_tokens=self._context_tokens)

    async def _chat_completions(self, http: Request, body: Any) -> Response | None:
        return await self._complete(http, [body], is_chat=True)

    async def _completions(self, http: Request, body: Any) -> Response | None:
        return await self._complete(http, _each_prompt(body), is_chat=False)

    async def _responses(self, http: Request, body: Any) -> Response | None:
        return await self._complete(http, [chat_of_response(body)], is_chat=True, render=ResponseRendering)

    async def _tokenize(self, _http: Request, body: Any) -> Response | None:
        return Response.json(tokenize_response(body, self._context_tokens))

    async def _detokenize(self, _http: Request, body: Any) -> Response | None:
        return Response.json({"prompt": detokenize(body)})

    async def _models(self, _http: Request) -> Response:
        return Response.json(models_document(self._model, self._context_tokens))

    async def _complete(
        self,
        http: Request,
        bodies: Sequence[Any],
        *,
        is_chat: bool,
        render: type[Rendering] = Rendering,
    ) -> Response | None:
        """Answer the prompts of one request, all computed at once."""
        asked = [self._text.apply_stops(self.read(body, is_chat=is_chat)) for body in bodies]
        remote = asked[0].remote_kv
        is_remote = remote is not None and await self._fetcher.fetch(remote, len(asked[0].prompt))
        number, prompt_tokens = self._engine.next_number(), sum(len(each.prompt) for each in asked)
        parts = [
            _Part(
                each,
                self._live(each, number if index == 0 else self._engine.next_number(), is_remote),
                render(each, self._text, number, index, prompt_tokens),
            )
            for index, each in enumerate(asked)
        ]
        try:
            for part in parts:
                self._engine.submit(part.answer, part.asked.prompt)
            return await (self._streamed(http, parts) if asked[0].is_stream else _whole(parts))
        finally:
            for part in parts:
                self._engine.close(part.answer)

    def _live(self, asked: CompletionRequest, number: str, is_remote: bool) -> LiveAnswer:
        request = EngineRequest(
            number,
            len(asked.prompt),
            asked.max_tokens,
            self._engine.hashes(asked.prompt),
            is_remote=is_remote,
            finish_reason=asked.ends_with,
        )
        return LiveAnswer(request, is_streamed=asked.is_stream)

    async def _embeddings(self, http: Request, body: Any) -> Response | None:
        """Compute each text as a prompt, and answer with numbers that depend on nothing but the text."""
        prompts = embedding_prompts(body, self._context_tokens)
        answers = []
        for prompt in prompts:
            request = EngineRequest(self._engine.next_number(), len(prompt), 1, self._engine.hashes(prompt))
            answers.append(LiveAnswer(request, is_streamed=False))
        try:
            for answer, prompt in zip(answers, prompts, strict=True):
                self._engine.submit(answer, prompt)
            for answer in answers:
                await answer.progress(0)
        finally:
            for answer in answers:
                self._engine.close(answer)
        return Response.json(embeddings_document(body, prompts, self._model))

    async def _streamed(self, http: Request, parts: Sequence[_Part]) -> Response | None:
        first = parts[0]
        await first.answer.progress(0)
        if len(parts) > 1 or not first.answer.is_finished:
            await _stream(http, parts)
            return None
        # all of it is here before anything was written: one write does
        tokens = first.answer.ready_tokens
        ending = first.rendering.ending(tokens, first.answer.request.cached_tokens)
        return Response(200, STREAM_HEADERS, first.rendering.events(0, tokens, is_last=True) + ending)


async def _answer(work: _Work, http: Request) -> Response | None:
    """Answer with what the work on a request's body gives; a failure is an answer too."""
    try:
        body = json.loads(await http.read())
    except BodyTooLarge as error:
        return _error(str(error), 413)
    except (InvalidBody, ValueError) as error:
        return _error(f"the request body is not JSON: {error}", 400)
    try:
        return await work(http, body)
    except UserError as error:
        return _error(str(error), 400)
    except RequestRefused as refusal:
        return _error(str(refusal), refusal.status)
    except PermanentError as error:
        return _error(str(error), 500)


async def _whole(parts: Sequence[_Part]) -> Response:
    for part in parts:
        await part.answer.progress(0)
    tokens, cached_tokens = _totals(parts)
    choices = [part.rendering.choice(part.answer.ready_tokens) for part in parts]
    return Response(200, JSON_HEADERS, parts[0].rendering.document(choices, tokens, cached_tokens))


async def _stream(http: Request, parts: Sequence[_Part]) -> None:
    """Write the tokens as they come, one prompt's after another's.

    On a failure the answer is cut, so that no client takes the stream for complete.
    """
    client = http.connection
    try:
        client.start_stream(http, STREAM_HEADERS)
        for part in parts:
            answer, written = part.answer, 0
            await answer.progress(0)
            while not answer.is_finished:
                written, start = answer.ready_tokens, written
                await client.write(part.rendering.events(start, written, is_last=False))
                await answer.progress(written)
            await answer.progress(written)  # raises when it ended in a failure
            data = part.rendering.events(written, answer.ready_tokens, is_last=True)
            if part is not parts[-1]:
                await client.write(data)
        await client.write(data + parts[0].rendering.ending(*_totals(parts)))
        await client.end_stream()
    except ConnectionError:
        log.debug("a client left the stream of request %s", parts[0].answer.request.request_id)
    except PermanentError as error:
        log.debug("request %s is cut: %s", parts[0].answer.request.request_id, error)


def _totals(parts: Sequence[_Part]) -> tuple[int, int]:
    """Add up the tokens of the answers, and those of the prompts that were cached."""
    return (
        sum(part.answer.ready_tokens for part in parts),
        sum(part.answer.request.cached_tokens for part in parts),
    )


def _each_prompt(body: Any) -> list[Any]:
    """Make a body for each prompt of a completion that has a list of them."""
    prompts = body.get("prompt") if isinstance(body, Mapping) else None
    if isinstance(prompts, list) and len(prompts) > 1 and isinstance(prompts[0], str | list):
        return [{**body, "prompt": [prompt]} for prompt in prompts]
    return [body]


def _error(message: str, status: int) -> Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return Response(status, JSON_HEADERS, error_document(message, kind))

"""A client of ``/v1/completions``: one HTTP session, one service, one model."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import aiohttp

from dynaplan.lab.profiling.load.answers import Answer, AnswerStream, RequestFailed, refusal
from dynaplan.util.errors import DeploymentError
from dynaplan.util.tls import ClientTls

REQUEST_TIMEOUT_S = 1800.0
"""Seconds that a whole answer may take, as the frontend has it."""

MODELS_S = 10.0
"""Seconds in which the service must name its models."""

JSON_HEADERS = {"Content-Type": "application/json"}


def open_session(api_key: str = "", tls: ClientTls = True) -> aiohttp.ClientSession:
    """Return a session, to be closed, with as many connections as there are requests."""
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        connector=aiohttp.TCPConnector(limit=0, ssl=tls),
        timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S),
    )


async def served_model(session: aiohttp.ClientSession, url: str) -> str:
    """Return the first model that the service names; raises DeploymentError when it names none."""
    try:
        async with asyncio.timeout(MODELS_S), session.get(f"{url}/v1/models") as response:
            if response.status != 200:
                raise DeploymentError(
                    f"{url}/v1/models answers {response.status}: {(await response.text())[:300]}",
                    hint="With 401, set DYNAPLAN_API_KEY or give --api-key.",
                )
            listed = (await response.json(content_type=None))["data"]
            models = [str(each["id"]) for each in listed]
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise DeploymentError(
            f"{url} does not answer: {error or type(error).__name__}",
            hint="`dynaplan status` shows what runs.",
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise DeploymentError(
            f"{url}/v1/models is no list of models",
            hint="Expected the base address of an OpenAI-compatible API.",
        ) from error
    if not models:
        raise DeploymentError(f"{url} serves no model yet", hint="`dynaplan status` shows when one is ready.")
    return models[0]


class CompletionClient:
    """Sends prompts, which are JSON (``prompts.PromptPool``), and reads their streamed answers."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session = session
        self._url = f"{url}/v1/completions"
        self._model = model

    async def complete(self, prompt: bytes, output_tokens: int, stream: AnswerStream | None = None) -> Answer:
        """Return an answer that is ended by nothing but its length; ``stream`` shows it while it arrives.

        Raises RequestFailed for everything but a whole answer.
        """
        stream = stream or AnswerStream()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        await self._post(self._payload(prompt, output_tokens, options), stream)
        return stream.answer()

    async def prime(self, prompt: bytes) -> None:
        """Have the prompt computed, and wait for it; raises RequestFailed.

        Not streamed: the text of one single token may be part of a character, and never be sent.
        """
        await self._post(self._payload(prompt, 1, {"stream": False}), AnswerStream())

    def _payload(self, prompt: bytes, output_tokens: int, options: dict[str, Any]) -> bytes:
        lengths = {"max_tokens": output_tokens, "min_tokens": output_tokens, "ignore_eos": True}
        rest = {"model": self._model, **lengths, **options}
        return b'{"prompt":' + prompt + b"," + json.dumps(rest).encode()[1:]

    async def _post(self, payload: bytes, stream: AnswerStream) -> None:
        stream.sent_s = time.perf_counter()
        try:
            async with self._session.post(self._url, data=payload, headers=JSON_HEADERS) as response:
                if response.status != 200:
                    raise refusal(response.status, await response.text(errors="replace"))
                async for data in response.content.iter_any():
                    stream.take(data, time.perf_counter())
        except TimeoutError:
            limit_s = self._session.timeout.total
            raise RequestFailed("timed out", f"no whole answer within {limit_s:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise RequestFailed("cannot connect", str(error)) from None
        except (aiohttp.ClientError, OSError) as error:
            raise RequestFailed("broke off", f"{type(error).__name__}: {error}") from None

"""Commands of a llama-swap file whose programs are known to nobody: what they say comes to the client."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dynaplan.util.sockets import free_port
from tests.e2e.deployment import Deployment
from tests.fakes.polling import wait_until

SERVER = f"{sys.executable} {Path(__file__).parent / 'tools' / 'any_server.py'}"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.body)


class Client:
    """Asks one deployment, without following redirects."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment

        class Stays(urllib.request.HTTPRedirectHandler):
            def redirect_request(self, *_: Any) -> None:
                return None

        self._opener = urllib.request.build_opener(Stays)

    def ask(self, path: str, document: Any = None, method: str | None = None, **headers: str) -> Answer:
        data = None if document is None else json.dumps(document).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(
            self.deployment.url + path, data, {"Content-Type": "application/json", **named}, method=method
        )
        try:
            with self._opener.open(request, timeout=60) as found:
                return Answer(found.status, dict(found.headers), found.read())
        except urllib.error.HTTPError as error:
            return Answer(error.code, dict(error.headers), error.read())

    def chat(self, message: str, *, stream: bool, model: str = "any") -> Answer:
        messages = [{"role": "user", "content": message}]
        return self.ask("/v1/chat/completions", {"model": model, "stream": stream, "messages": messages})


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    directory = tmp_path_factory.mktemp("any")
    port = free_port()
    file = directory / "config.yaml"
    file.write_text(f"""
models:
  any:
    cmd: {SERVER} --port ${{PORT}}
    name: Any server
    description: of nobody
    metadata: {{size: 3}}
    filters: {{setParams: {{"top_k?": 40, seed: 1}}}}
    useModelName: its-own-name
    ttl: 60
  based: {{cmd: "{SERVER} --port {port} --base /api", proxy: "http://localhost:{port}/api"}}
  unchecked: {{cmd: "{SERVER} --port ${{PORT}} --unchecked", checkEndpoint: none}}
  slow: {{cmd: "sh -c 'sleep 3; exec {SERVER} --port ${{PORT}}'"}}
groups: {{all: {{swap: false, exclusive: false, members: [any, based, unchecked]}}}}
hooks: {{on_startup: {{preload: [all]}}}}
""")
    with Deployment(directory, str(file), "") as deployment:
        made = Client(deployment.start())
        assert made.chat("whole", stream=False).status == 200  # loaded: no comment comes before
        yield made


def test_a_document_for_a_stream_and_a_stream_for_a_document_come_as_they_are(client: Client) -> None:
    whole = client.chat("whole", stream=True)
    assert whole.headers["Content-Type"] == "application/json"
    assert whole.document["choices"][0]["message"]["content"] == "whole"
    streamed = client.chat("stream", stream=False)
    assert (streamed.headers["Content-Type"], streamed.body.count(b"part")) == ("text/event-stream", 2)


def test_a_stream_may_end_without_an_end_event(client: Client) -> None:
    assert client.chat("stream", stream=True).body.count(b"part") == 2


@pytest.mark.parametrize("status", [400, 404, 429, 500, 502, 503])
@pytest.mark.parametrize("stream", [True, False])
def test_an_error_of_any_status_comes_with_its_own_words(client: Client, status: int, stream: bool) -> None:
    answer = client.chat(str(status), stream=stream)
    assert (answer.status, answer.body) == (status, b"<p>its own words</p>")


def test_only_a_connection_that_breaks_is_a_death(client: Client) -> None:
    answer = client.chat("break", stream=False)
    assert (answer.status, answer.document["error"]["code"]) == (502, "worker_failed")
    assert client.chat("whole", stream=False).status == 200


def test_its_requests_are_filtered_and_named_as_it_knows_itself(client: Client) -> None:
    request = client.chat("whole", stream=False).document["request"]
    assert (request["model"], request["top_k"], request["seed"]) == ("its-own-name", 40, 1)
    echo = client.ask("/infill", {"model": "any", "top_k": 3}).document
    assert json.loads(echo["body"]) == {"model": "its-own-name", "top_k": 3, "seed": 1}


def test_a_path_of_its_own_is_reached_by_the_model_that_is_named(client: Client) -> None:
    echo = client.ask("/props?model=any&a=%2F").document
    assert (echo["method"], echo["path"]) == ("GET", "/props?model=any&a=%2F")
    assert client.ask("/v1/anything", {"model": "any"}, method="PUT").document["method"] == "PUT"
    nameless = client.ask("/props")
    assert (nameless.status, nameless.document["error"]["code"]) == (404, "unknown_url")
    assert "/upstream/MODEL/props" in nameless.document["error"]["message"]
    slip = client.ask("/v1/chat/completion", {"model": "any"})
    assert "Did you mean '/v1/chat/completions'" in slip.document["error"]["message"]


def test_its_page_is_below_upstream(client: Client) -> None:
    page = client.ask("/upstream/any/", Accept="text/html")
    assert (page.status, page.body) == (200, b"<html>its own page</html>")
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    moved = client.ask("/upstream/any?a=1")
    assert (moved.status, moved.headers["Location"]) == (301, "/upstream/any/?a=1")
    assert client.ask("/upstream/any", {}).status == 308
    assert client.ask("/upstream/none/props").status == 404
    assert client.ask("/upstream/any/", method="HEAD").status == 200


def test_upstream_passes_any_method_but_no_key_cookie_or_word_on_origins(client: Client) -> None:
    answer = client.ask(
        "/upstream/any/props?x=1",
        Authorization="Bearer mine",
        Cookie="a=b",
        X_Mine="kept",
        Origin="http://localhost",
    )
    echo = answer.document
    assert (echo["path"], echo["headers"]["x-mine"]) == ("/props?x=1", "kept")
    assert "cookie" not in echo["headers"] and echo["headers"]["authorization"] != "Bearer mine"
    assert answer.headers["Access-Control-Allow-Origin"] == "http://localhost"
    assert client.ask("/upstream/any/thing", {"a": 1}, method="DELETE").document["method"] == "DELETE"
    stream = client.ask("/upstream/any/completion", {"prompt": "stream"})
    assert (stream.headers["Content-Type"], stream.body.count(b"part")) == ("text/event-stream", 2)
    chat = client.ask(
        "/upstream/any/v1/chat/completions", {"messages": [{"role": "user", "content": "whole"}]}
    )
    assert chat.document["request"]["model"] == "its-own-name"


def test_what_steers_engines_and_what_they_would_fetch_is_not_passed(client: Client) -> None:
    for path in ("/sleep", "//sleep", "/x/../sleep", "/%73leep", "/slots/0?action=erase"):
        assert client.ask(f"/upstream/any{path}", {}).status == 403, path
    fetched = client.ask("/upstream/any/infill", {"image_url": {"url": "http://10.0.0.1/"}})
    assert fetched.document["error"]["code"] == "media_address"
    assert client.ask("/infill", {"model": "any", "kv_slot_file": "x"}).status == 400


def test_a_fixed_port_with_a_path_and_a_program_without_a_check_are_reached(client: Client) -> None:
    assert client.chat("whole", stream=False, model="based").status == 200
    assert client.ask("/upstream/based/props").document["path"] == "/api/props"
    assert client.chat("whole", stream=False, model="unchecked").status == 200


def test_a_model_is_shown_as_llama_swap_shows_it(client: Client) -> None:
    for path in ("/v1/models", "/models"):
        listed = {each["id"]: each for each in client.ask(path).document["data"]}
        any_ = listed["any"]
        assert (any_["name"], any_["description"]) == ("Any server", "of nobody")
        assert any_["meta"] == {"llamaswap": {"size": 3}}
        assert not {"name", "description", "meta"} & listed["based"].keys()
    running = {each["model"]: each for each in client.ask("/running").document["running"]}
    shown = running["any"]
    assert (shown["state"], shown["name"], shown["ttl"]) == ("ready", "Any server", 60)
    assert "any_server.py --port '${PORT}'" in shown["cmd"]
    assert urllib.request.urlopen(f"{shown['proxy']}/health").status == 200
    assert running["based"]["proxy"].endswith("/api")


def first_lines(client: Client, path: str, until: Callable[[bytes], bool]) -> bytes:
    """Read a stream that never ends until there is what is looked for."""
    text = b""
    with urllib.request.urlopen(client.deployment.url + path, timeout=60) as stream:
        while not until(text):
            text += stream.read1()
    return text


def test_logs_are_read_and_followed_by_the_names_that_llama_swap_has(client: Client) -> None:
    assert b"dynaplan" in client.ask("/logs").body
    assert client.ask("/logs", Accept="text/html").headers["Location"] == "/ui/"
    for path in ("/logs/stream/upstream", "/logs/stream/any"):
        assert first_lines(client, path, lambda text: b"any server:" in text)
    assert first_lines(client, "/logs/stream", lambda text: b"\n" in text)
    assert client.ask("/logs/stream/none").status == 404
    url = f"{client.deployment.url}/logs/stream/any?no-history"
    with urllib.request.urlopen(url, timeout=60) as stream:
        client.ask("/upstream/any/a-mark")
        text = b""
        while b"a-mark" not in text:
            text += stream.read1()
    assert b"/v1/chat/completions" not in text


def test_events_tell_of_models_logs_and_requests(client: Client) -> None:
    client.chat("whole", stream=False)
    text = first_lines(
        client, "/api/events", lambda text: b'"type": "metrics"' in text and text.endswith(b"\n\n")
    )
    events = [json.loads(each.partition(b"data:")[2]) for each in text.split(b"\n\n") if each]
    told = {each["type"]: json.loads(each["data"]) for each in events}
    assert told.keys() == {"modelStatus", "logData", "inflight", "metrics"}
    states = {each["id"]: each["state"] for each in told["modelStatus"]}
    assert states["any"] == "ready"
    assert told["metrics"][-1]["model"] == "any"
    assert told["metrics"] == client.ask("/api/metrics").document


def test_unloading_by_the_api_says_so(client: Client) -> None:
    """The last test of this file: it takes the models away."""
    assert client.ask("/api/models/unload/based", {}).body == b"OK"
    assert client.ask("/api/models/unload", {}).document == {"msg": "ok"}
    wait_until(lambda: client.ask("/running").document["running"] == [])
    assert client.ask("/props?model=any", method="DELETE").status == 200  # any request loads


def test_a_document_for_a_stream_that_comments_have_begun_is_its_only_event(client: Client) -> None:
    answer = client.chat("whole", stream=True, model="slow")
    comments, _, events = answer.body.partition(b"data: ")
    assert comments.startswith(b": loading slow")
    event, end = (b"data: " + events).removesuffix(b"\n\n").split(b"\n\n")
    chunk = json.loads(event.removeprefix(b"data: "))
    assert (chunk["object"], chunk["choices"][0]["delta"]) == ("chat.completion.chunk", {"content": "whole"})
    assert end == b"data: [DONE]"


def test_a_key_protects_what_it_protects_in_llama_swap(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"models: {{any: {{cmd: '{SERVER} --port ${{PORT}}'}}}}\napiKeys: [one, two]\n")
    with Deployment(tmp_path, str(file), "") as deployment:
        client = Client(deployment.start())
        paths = ("/v1/models", "/running", "/logs", "/api/metrics", "/upstream/any/props", "/props")
        for path in (*paths, "/logs/stream/any", "/api/events", "/unload"):
            assert client.ask(path).status == 401, path
        for path in paths:
            assert client.ask(path, Authorization="Bearer two").status == 200, path
        assert client.ask("/health").status == 200
        assert "authorization" in client.ask("/props", X_Api_Key="one").document["headers"]

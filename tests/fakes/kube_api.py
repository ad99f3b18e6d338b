"""A Kubernetes API server in memory, behind an httpx2 transport: no socket, no controller.

Copies of kube-apiserver 1.20.2 (as recorded in tests/fixtures/kubernetes): resource versions that rise with
every write and refuse an older one with 409; ``generation``, which rises with ``spec``; the ``scale``
subresource, whose ``spec`` is empty at 0; merge and JSON patches, a failed ``test`` with 422; 422 for
a negative number of replicas; ``Status`` documents; 404 as plain text for a group that is not served; label
selectors ``a=b``, ``a in (b,c)`` and ``a``, the field selector ``metadata.name=a``; watches of what was
changed since a version, with an ERROR of 410 for one that was forgotten; 422 for more than 1 MiB in a
ConfigMap and for 256 KiB of annotations. It takes any object otherwise: there is no schema. A watch ends when
it has told what there was, or stays open when ``holds_watches``.
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

import httpx2

from dynaplan.kubernetes.client import KubernetesClient, Object

PATH = re.compile(
    r"^(?P<api>/api/v1|/apis/[^/]+/[^/]+)/namespaces/(?P<ns>[^/]+)/(?P<plural>[^/]+)"
    r"(?:/(?P<name>[^/]+)(?:/(?P<sub>[^/]+))?)?$"
)
LARGEST_MAP_BYTES, LARGEST_ANNOTATIONS_BYTES = 1 << 20, 1 << 18
STATUS_REASONS = {403: "Forbidden", 404: "NotFound", 409: "Conflict", 422: "Invalid"}


class Refused(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(eq=False)
class HeldWatch(httpx2.AsyncByteStream):
    """An open watch: what it has not told yet, and None when the connection breaks."""

    selects: Callable[[str, str, Object], bool]
    open: list[HeldWatch]
    lines: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        self.open.append(self)
        try:
            while (line := await self.lines.get()) is not None:
                yield line
            raise httpx2.ReadError("the connection broke")
        finally:
            self.open.remove(self)


class KubeApi:
    """``objects`` are by (api, plural, name). ``denied`` are (verb, plural) pairs; ``before`` is run at each
    request with its method and path, and may change objects or raise ``httpx2.ConnectError``.
    """

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.requests: list[tuple[str, str, Any]] = []
        self.denied: set[tuple[str, str]] = set()
        self.served: set[str] | None = None
        self.is_available = True
        self.before: Callable[[str, str], None] = lambda method, path: None
        self.holds_watches = False
        self._version = self._forgotten = 100
        self._changes: list[tuple[str, str, str, Object]] = []
        self._watches: list[HeldWatch] = []

    def client(self, namespace: str = "default") -> KubernetesClient:
        """A client of this server."""
        http = httpx2.AsyncClient(
            transport=httpx2.MockTransport(self._answer), base_url="https://cluster.test"
        )
        return KubernetesClient(http, namespace)

    def add(self, api: str, plural: str, document: Object) -> Object:
        """Put an object there, as another client would; returns it."""
        name = document["metadata"]["name"]
        found = copy.deepcopy(document)
        found["metadata"].setdefault("generation", 1)
        found["metadata"].setdefault("namespace", "default")
        self.objects[api, plural, name] = found
        self._touch(api, plural, found, "ADDED")
        return found

    def change(self, api: str, plural: str, name: str, **fields: Any) -> Object:
        """Merge fields into an object, as another client would."""
        found = self.objects[api, plural, name]
        before = copy.deepcopy(found.get("spec"))
        _merge(found, fields)
        self._touch(api, plural, found, "MODIFIED", is_new_spec=found.get("spec") != before)
        return found

    def remove(self, api: str, plural: str, name: str) -> None:
        """Delete an object, as another client would."""
        self._touch(api, plural, self.objects.pop((api, plural, name)), "DELETED")

    def go_away(self) -> None:
        """Be away: nobody listens any more, and open watches break."""
        self.is_available = False
        self.break_watches()

    def break_watches(self) -> None:
        """Break the connections of open watches."""
        for watch in self._watches:
            watch.lines.put_nowait(None)

    def forget(self) -> None:
        """Forget all changes: a watch of an older version has expired."""
        self._forgotten = self._version
        self._changes.clear()

    def writes(self) -> list[tuple[str, str, Any]]:
        """The requests that were to change something."""
        return [each for each in self.requests if each[0] != "GET"]

    def _touch(self, api: str, plural: str, found: Object, kind: str, *, is_new_spec: bool = False) -> None:
        self._version += 1
        found["metadata"]["resourceVersion"] = str(self._version)
        if is_new_spec:
            found["metadata"]["generation"] = found["metadata"].get("generation", 0) + 1
        self._changes.append((api, plural, kind, copy.deepcopy(found)))
        for watch in self._watches:
            if watch.selects(api, plural, found):
                watch.lines.put_nowait(_line(kind, found))

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        path = request.url.path
        body = json.loads(request.content) if request.content else None
        self.before(request.method, path)
        if not self.is_available:
            raise httpx2.ConnectError("All connection attempts failed", request=request)
        self.requests.append((request.method, path, body))
        match = PATH.match(path)
        if not match or (self.served is not None and match["api"] not in self.served):
            return httpx2.Response(404, text="404 page not found\n")
        query = {key: values[0] for key, values in parse_qs(request.url.query.decode()).items()}
        try:
            return self._of(request, match, query, body)
        except Refused as error:
            return httpx2.Response(
                error.code,
                json={
                    "kind": "Status",
                    "apiVersion": "v1",
                    "status": "Failure",
                    "message": str(error),
                    "reason": STATUS_REASONS[error.code],
                    "code": error.code,
                },
            )

    def _of(
        self, request: httpx2.Request, match: re.Match[str], query: dict[str, str], body: Any
    ) -> httpx2.Response:
        api, plural, name = match["api"], match["plural"], match["name"]
        verb = _verb(request.method, name, query)
        if (verb, plural) in self.denied or (verb, f"{plural}/{match['sub'] or ''}") in self.denied:
            raise Refused(403, f'{plural} is forbidden: User "planner" cannot {verb} resource "{plural}"')
        if verb == "watch":
            return self._watch(api, plural, query)
        if verb == "list":
            items = [each for each in self._all(api, plural) if _is_asked_for(query, each)]
            metadata = {"resourceVersion": str(self._version)}
            return httpx2.Response(200, json={"kind": "List", "metadata": metadata, "items": items})
        if verb == "create":
            _check_size(plural, body)
            if (api, plural, body["metadata"]["name"]) in self.objects:
                raise Refused(409, f'{plural} "{body["metadata"]["name"]}" already exists')
            return httpx2.Response(201, json=self.add(api, plural, body))
        found = self.objects.get((api, plural, name))
        if found is None:
            raise Refused(404, f'{plural} "{name}" not found')
        if verb == "delete":
            self.remove(api, plural, name)
            return httpx2.Response(200, json={"kind": "Status", "status": "Success"})
        if verb != "get":
            self._write(api, plural, found, match["sub"], body, request)
        return httpx2.Response(200, json=_scale(found) if match["sub"] == "scale" else found)

    def _write(
        self, api: str, plural: str, found: Object, subresource: str, body: Any, request: httpx2.Request
    ) -> None:
        new = copy.deepcopy(_scale(found) if subresource == "scale" else found)
        kind = request.headers["Content-Type"]
        if request.method == "PUT":
            new = copy.deepcopy(body)
        elif kind == "application/merge-patch+json":
            _merge(new, body)
        elif kind == "application/json-patch+json":
            _json_patch(new, body)
        else:
            raise AssertionError(f"unexpected {kind}")
        _check_size(plural, new)
        version = new["metadata"].get("resourceVersion")
        if version is not None and version != found["metadata"]["resourceVersion"]:
            raise Refused(
                409, "the object has been modified; please apply your changes to the latest version"
            )
        before = copy.deepcopy(found.get("spec"))
        if subresource == "scale":
            replicas = new["spec"].get("replicas", 0)
            if replicas < 0:
                raise Refused(422, "spec.replicas: Invalid value: should be greater than or equal to 0")
            found["spec"]["replicas"] = replicas
        else:
            kept = found["metadata"]
            found.clear()
            found.update(new)
            found["metadata"] = {**kept, **new["metadata"]}
        self._touch(api, plural, found, "MODIFIED", is_new_spec=found.get("spec") != before)

    def _watch(self, api: str, plural: str, query: dict[str, str]) -> httpx2.Response:
        """Answer with what has changed since the version; its reader begins another watch when it ends."""
        since = int(query.get("resourceVersion", "0"))
        if 0 < since < self._forgotten:
            status = {"kind": "Status", "code": 410, "message": f"too old resource version: {since}"}
            return httpx2.Response(200, content=_line("ERROR", status))

        def is_watched(of_api: str, of_plural: str, found: Object) -> bool:
            return (of_api, of_plural) == (api, plural) and _is_asked_for(query, found)

        told = [
            _line(kind, found)
            for of_api, of_plural, kind, found in self._changes
            if is_watched(of_api, of_plural, found) and int(found["metadata"]["resourceVersion"]) > since
        ]
        if not self.holds_watches:
            return httpx2.Response(200, content=b"".join(told))
        watch = HeldWatch(is_watched, self._watches)
        for line in told:
            watch.lines.put_nowait(line)
        return httpx2.Response(200, stream=watch)

    def _all(self, api: str, plural: str) -> list[Object]:
        return [found for key, found in sorted(self.objects.items()) if key[:2] == (api, plural)]


def _line(kind: str, found: Object) -> bytes:
    return json.dumps({"type": kind, "object": found}).encode() + b"\n"


def _is_asked_for(query: dict[str, str], found: Object) -> bool:
    name = query.get("fieldSelector", "").removeprefix("metadata.name=")
    return selects(query.get("labelSelector", ""), found) and name in ("", found["metadata"]["name"])


def _check_size(plural: str, found: Object) -> None:
    annotations = found["metadata"].get("annotations") or {}
    if sum(len(name) + len(text) for name, text in annotations.items()) > LARGEST_ANNOTATIONS_BYTES:
        raise Refused(422, "metadata.annotations: Too long: must have at most 262144 bytes")
    if plural == "configmaps" and sum(map(len, found.get("data", {}).values())) > LARGEST_MAP_BYTES:
        raise Refused(422, "[]: Too long: must have at most 1048576 bytes")


def selects(selector: str, document: Object) -> bool:
    """Tell whether a label selector matches an object."""
    labels = document["metadata"].get("labels", {})
    for term in re.findall(r"[^,(]+(?:\([^)]*\))?", selector):
        key, _, rest = term.strip().partition(" in ")
        if rest:
            if labels.get(key) not in re.split(r"\s*,\s*", rest.strip("() ")):
                return False
            continue
        key, has_value, value = term.strip().partition("=")
        if (has_value and labels.get(key) != value) or key not in labels:
            return False
    return True


def _verb(method: str, name: str | None, query: dict[str, str]) -> str:
    if method == "GET":
        return "get" if name else ("watch" if query.get("watch") else "list")
    return {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}[method]


def _scale(found: Object) -> Object:
    """Return the scale subresource of an object."""
    replicas = found["spec"].get("replicas", 1)
    kept = ("name", "namespace", "uid", "resourceVersion")
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {key: found["metadata"][key] for key in kept if key in found["metadata"]},
        "spec": {"replicas": replicas} if replicas else {},
        "status": {"replicas": found.get("status", {}).get("replicas", 0)},
    }


def _merge(document: Object, changes: Object) -> None:
    for key, value in changes.items():
        if value is None:
            document.pop(key, None)
        elif isinstance(value, dict) and isinstance(document.get(key), dict):
            _merge(document[key], value)
        else:
            document[key] = copy.deepcopy(value)


def _json_patch(document: Object, operations: list[Object]) -> None:
    for each in operations:
        *parents, last = [part for part in each["path"].split("/") if part]
        place: Any = document
        for part in parents:
            place = place[int(part)] if isinstance(place, list) else place.setdefault(part, {})
        if each["op"] == "test":
            if place.get(last) != each["value"]:
                raise Refused(422, "the server rejected our request due to an error in our request")
        elif each["op"] in ("add", "replace"):
            place[last] = copy.deepcopy(each["value"])
        else:
            raise AssertionError(f"unexpected {each['op']}")

"""A client of the Kubernetes API: plain JSON objects of one namespace, and errors that say what helps.

Credentials, TLS and the renewal of tokens are lightkube's (MIT; the extra ``kubernetes``); it is imported
when a client is made and not before. Its classes for resources are not used: most that is read here is
a custom resource, for which it has none (docs/decisions/0046).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dynaplan.util.errors import (
    ClusterConflict,
    ClusterExpired,
    ClusterForbidden,
    ClusterNotFound,
    ClusterRefused,
    ClusterUnavailable,
    ConfigError,
)

NAMESPACE_VARIABLE = "POD_NAMESPACE"
"""The environment variable that names the Kubernetes namespace; without it the credentials do."""

MERGE_PATCH, JSON_PATCH = "application/merge-patch+json", "application/json-patch+json"

TIMEOUT_S = 5.0
"""Longest wait for one answer of the API server, seconds."""

WATCH_S = 60
"""Seconds after which the server is asked to end a watch: its reader begins another one, so that a connection
that leads nowhere is noticed."""

PAGE = 500
"""Objects that are asked for at once."""

Object = dict[str, Any]
"""One object of the cluster, as JSON has it."""


@dataclass(frozen=True)
class Resource:
    """A kind of object that lives in a namespace: its group ("" is the core's), version and plural."""

    group: str
    version: str
    plural: str

    @property
    def api_version(self) -> str:
        """The ``apiVersion`` of such an object, such as ``apps/v1``."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        """Return the path of the collection, of one object, or of its subresource."""
        base = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        parts = (base, "namespaces", namespace, self.plural, name, subresource)
        return "/".join(part for part in parts if part)


CONFIG_MAPS = Resource("", "v1", "configmaps")
PODS = Resource("", "v1", "pods")


class KubernetesClient:
    """Reads and writes the objects of one Kubernetes namespace; ``http`` is an ``httpx2.AsyncClient``.

    Methods raise ClusterUnavailable when the server does not answer or cannot now, ClusterConflict when an
    object was changed or made meanwhile, ClusterNotFound, ClusterForbidden, and ClusterRefused for
    an object that the server does not take.
    """

    def __init__(self, http: Any, namespace: str) -> None:
        self.namespace = namespace
        self._http = http

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> KubernetesClient:
        """Return a client with a pod's credentials, or else those of ``KUBECONFIG`` or ``~/.kube/config``.

        Raises ConfigError when lightkube is not installed, and for credentials that are missing or wrong.
        """
        try:
            from lightkube.config import client_adapter
            from lightkube.config.kubeconfig import KubeConfig
            from lightkube.config.models import User
            from lightkube.core.exceptions import ConfigError as WrongConfig
        except ImportError as error:
            raise ConfigError(
                "Kubernetes is asked for, and its client is not installed: lightkube",
                hint="Run: pip install lightkube",
            ) from error
        logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs every request
        try:
            found = KubeConfig.from_env().get()
            config = found if found.user else found._replace(user=User())
            parameters = client_adapter.ConnectionParams(timeout=TIMEOUT_S)
            http = client_adapter.AsyncClient(config, parameters)
        except (WrongConfig, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
            raise ConfigError(
                f"no credentials for a Kubernetes cluster: {str(error) or type(error).__name__}",
                hint="Expected a pod's service account, or KUBECONFIG naming one kubeconfig file.",
            ) from error
        return cls(http, environ.get(NAMESPACE_VARIABLE) or config.namespace)

    async def close(self) -> None:
        """Close the connections to the API server; what the cluster holds stays."""
        await self._http.aclose()

    async def get(self, resource: Resource, name: str, subresource: str = "") -> Object:
        """Return an object, or its subresource, such as ``scale``."""
        return await self._object("GET", resource.path(self.namespace, name, subresource))

    async def list(
        self, resource: Resource, labels: str = "", *, fields: str = ""
    ) -> tuple[list[Object], str]:
        """Return the objects that label and field selectors match, and the version of the collection."""
        items: list[Object] = []
        parameters: dict[str, str | int] = {"limit": PAGE, **_selected(labels, fields)}
        while True:
            page = await self._object("GET", resource.path(self.namespace), parameters=parameters)
            items += page.get("items") or []
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                return items, str(metadata.get("resourceVersion", ""))
            parameters["continue"] = metadata["continue"]

    async def watch(
        self, resource: Resource, labels: str = "", version: str = "", *, fields: str = ""
    ) -> AsyncGenerator[tuple[str, Object]]:
        """Yield ``("ADDED" | "MODIFIED" | "DELETED" | "BOOKMARK", object)`` of changes after a version.

        Ends when the server ends the watch: watch again from the newest version seen. Raises ClusterExpired
        for a version that the server has forgotten: list again.
        """
        import httpx2

        parameters: dict[str, str | int] = {"watch": "true", "timeoutSeconds": WATCH_S}
        parameters |= {"allowWatchBookmarks": "true", **_selected(labels, fields)}
        parameters |= {"resourceVersion": version} if version else {}
        timeout = httpx2.Timeout(TIMEOUT_S, read=WATCH_S + TIMEOUT_S)
        path = resource.path(self.namespace)
        with _answers_or_unavailable():
            async with self._http.stream("GET", path, params=parameters, timeout=timeout) as answer:
                if answer.status_code >= 400:
                    await answer.aread()
                    raise _error(answer, "GET", path)
                async for line in answer.aiter_lines():
                    yield _event(json.loads(line), path)

    async def create(self, resource: Resource, document: Object) -> Object:
        """Make an object; ClusterConflict when one of its name is there."""
        return await self._object("POST", resource.path(self.namespace), document)

    async def replace(self, resource: Resource, name: str, document: Object, subresource: str = "") -> Object:
        """Write an object whole; with a ``metadata.resourceVersion`` only over that version of it."""
        return await self._object("PUT", resource.path(self.namespace, name, subresource), document)

    async def patch(
        self, resource: Resource, name: str, changes: Object | Sequence[Object], subresource: str = ""
    ) -> Object:
        """Change an object: a mapping is a merge patch, a list of operations a JSON patch."""
        kind = MERGE_PATCH if isinstance(changes, dict) else JSON_PATCH
        return await self._object("PATCH", resource.path(self.namespace, name, subresource), changes, kind)

    async def delete(self, resource: Resource, name: str) -> None:
        """Delete an object; raises ClusterNotFound when it is not there."""
        await self._object("DELETE", resource.path(self.namespace, name))

    async def _object(
        self,
        method: str,
        path: str,
        body: Object | Sequence[Object] | None = None,
        content_type: str = "application/json",
        *,
        parameters: Mapping[str, str | int] | None = None,
    ) -> Object:
        content = None if body is None else json.dumps(body).encode()
        headers = {"Accept": "application/json", "User-Agent": "dynaplan"}
        headers |= {} if body is None else {"Content-Type": content_type}
        with _answers_or_unavailable():
            answer = await self._http.request(
                method, path, content=content, headers=headers, params=parameters
            )
            if answer.status_code >= 400:
                raise _error(answer, method, path)
            found: Object = answer.json()
        return found


def _selected(labels: str, fields: str) -> dict[str, str]:
    chosen = {"labelSelector": labels, "fieldSelector": fields}
    return {name: selector for name, selector in chosen.items() if selector}


@contextmanager
def _answers_or_unavailable() -> Iterator[None]:
    """Raise ClusterUnavailable where the server gives no answer, or its credentials cannot be renewed."""
    import httpx2
    from lightkube.core.exceptions import ConfigError as NoCredentials

    try:
        yield
    except NoCredentials as error:
        raise ClusterUnavailable(f"no credentials for the Kubernetes API server: {error}") from error
    except (httpx2.HTTPError, json.JSONDecodeError, OSError) as error:
        why = str(error) or type(error).__name__
        raise ClusterUnavailable(f"the Kubernetes API server does not answer: {why}") from error


def _event(document: Object, path: str) -> tuple[str, Object]:
    kind, found = document["type"], document["object"]
    if kind != "ERROR":
        return kind, found
    if found.get("code") == 410:
        raise ClusterExpired(f"the watch of {path} is too old: {found.get('message', '')}")
    raise ClusterUnavailable(f"the watch of {path} ended: {found.get('message', '')}")


def _error(answer: Any, method: str, path: str) -> Exception:
    """Return the error for an answer of 400 or above."""
    try:
        said = str(answer.json()["message"])
    except (ValueError, KeyError, TypeError):
        said = answer.text[:200].strip() or str(answer.status_code)
    match answer.status_code:
        case 401 | 403:
            return ClusterForbidden(
                f"the Kubernetes API server refuses {method} {path}: {said}",
                hint="Give the service account that right: docs/guides/kubernetes.md has its Role.",
            )
        case 404:
            return ClusterNotFound(f"{path} is not there: {said}")
        case 409:
            return ClusterConflict(f"{path} was changed meanwhile: {said}")
        case 410:
            return ClusterExpired(f"{path}: {said}")
        case 429 | 500 | 502 | 503 | 504:
            return ClusterUnavailable(f"the Kubernetes API server cannot now: {said}")
    return ClusterRefused(f"the Kubernetes API server refuses {method} {path}: {said}")

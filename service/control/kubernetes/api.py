"""Requests to a Kubernetes API server, with time-outs, retries and typed errors."""

import random
import threading
import time
from dataclasses import dataclass
from typing import Any, Literal

from service.control.kubernetes.connection import Connection, Response
from service.control.kubernetes.errors import Conflict, KubernetesError, NotFound, Unavailable, from_status
from service.control.kubernetes.resource import Object, Resource
from service.control.kubernetes.retry import RetryPolicy
from service.control.kubernetes.watch import Watch

FIELD_MANAGER = "shardyard"
_WRITE = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
IDLE_WATCH_S = 90.0
"""Silence after which a watch counts as broken: servers send a bookmark about once a minute."""
WATCH_S = 300.0
"""Length of one watch."""

Propagation = Literal["Background", "Foreground", "Orphan"]


@dataclass(frozen=True)
class Page:
    """A part of a collection."""

    items: list[Object]
    resource_version: str
    """Version of the whole collection, which a watch starts from."""
    cursor: str
    """Token of the next page; empty at the end."""


class KubernetesApi:
    """Requests in one namespace. Several threads may share it.

    Every method raises Unavailable, Forbidden, or another error of `errors.py` that its docstring names.
    """

    def __init__(
        self, connection: Connection, namespace: str = "", *, timeout_s: float = 10.0, retry: RetryPolicy | None = None
    ) -> None:
        """`namespace` defaults to that of the credentials."""
        self.namespace = namespace or connection.namespace
        self._connection = connection
        self._timeout_s = timeout_s
        self._retry = retry or RetryPolicy()
        self._closed = threading.Event()

    def apply(self, resource: Resource, manifest: Object, *, force: bool = False) -> Object:
        """Create the object, or set these fields of it (server-side apply). Unknown fields are refused.

        `force` takes over fields of other managers. Raises Invalid, Conflict.
        """
        return self._send(
            "PATCH",
            "patch",
            resource,
            name=manifest["metadata"]["name"],
            query={**_WRITE, "force": str(force).lower()},
            body=_typed(resource, manifest),
            content_type="application/apply-patch+yaml",
        )

    def create(self, resource: Resource, manifest: Object, *, dry_run: bool = False) -> Object:
        """Create the object; unknown fields are refused. With `dry_run` nothing is stored. Raises Invalid, and Conflict
        (`AlreadyExists`), also when an attempt whose response was lost created it."""
        query = {**_WRITE, **({"dryRun": "All"} if dry_run else {})}
        return self._send("POST", "create", resource, query=query, body=_typed(resource, manifest))

    def get(self, resource: Resource, name: str) -> Object:
        """The object. Raises NotFound."""
        return self._send("GET", "get", resource, name=name)

    def patch(self, resource: Resource, name: str, patch: Object) -> Object:
        """Merge these fields into the object (JSON merge patch). Raises NotFound, Invalid, Conflict."""
        return self._send(
            "PATCH", "patch", resource, name=name, query=_WRITE, body=patch, content_type="application/merge-patch+json"
        )

    def delete(
        self, resource: Resource, name: str, *, propagation: Propagation = "Background", uid: str | None = None
    ) -> bool:
        """Delete the object; return whether it existed. With `uid`, no other object of that name is deleted."""
        body: Object = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": propagation}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        try:
            self._send("DELETE", "delete", resource, name=name, body=body)
        except NotFound:
            return False
        except Conflict:
            if uid is None:
                raise
            return False  # the object of this uid is gone
        return True

    def list_page(
        self, resource: Resource, *, selector: str = "", fields: str = "", limit: int = 100, cursor: str = ""
    ) -> Page:
        """One page of the collection, filtered by a label selector and a field selector.

        Raises Gone if the cursor expired, NotFound if the server does not serve the resource.
        """
        query = _selection(selector, fields) | {"limit": str(limit)}
        if cursor:
            query["continue"] = cursor
        page = self._send("GET", "list", resource, query=query)
        metadata, items = page.get("metadata"), page.get("items", [])
        items = [] if items is None else items  # Go's empty slice
        if not isinstance(metadata, dict) or "resourceVersion" not in metadata or not _are_objects(items):
            raise Unavailable(f"the API server answered without a list of {resource.name}")
        return Page(items, str(metadata["resourceVersion"]), metadata.get("continue") or "")

    def watch(
        self,
        resource: Resource,
        resource_version: str,
        *,
        selector: str = "",
        fields: str = "",
        timeout_s: float = WATCH_S,
        idle_s: float = IDLE_WATCH_S,
    ) -> Watch:
        """Open a watch for changes after this version, of at most `timeout_s`. Not retried. Raises Gone."""
        query = _selection(selector, fields) | {
            "watch": "true",
            "resourceVersion": resource_version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(1, round(timeout_s))),
        }
        path = resource.path(self.namespace)
        response = self._connection.stream("GET", path, query=query, idle_s=idle_s)
        if response.status != 200:
            body = Response(response.status, response.read(1 << 16), None)
            response.close()
            raise from_status(response.status, body.object(), verb="watch", resource=resource.name, retry_after_s=None)
        return Watch(response, resource)

    def close(self) -> None:
        """End waits between attempts, and close idle connections."""
        self._closed.set()
        self._connection.close()

    def _send(
        self,
        method: str,
        verb: str,
        resource: Resource,
        *,
        name: str = "",
        query: dict[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> Object:
        path = resource.path(self.namespace, name)
        started_at, attempt = time.monotonic(), 0
        while True:
            try:
                response = self._connection.request(
                    method, path, query=query or {}, body=body, content_type=content_type, timeout_s=self._timeout_s
                )
                if 200 <= response.code < 300:
                    return response.object()
                raise from_status(
                    response.code,
                    response.object(),
                    verb=verb,
                    resource=resource.name,
                    retry_after_s=response.retry_after_s,
                )
            except KubernetesError as error:
                elapsed_s = time.monotonic() - started_at
                delay_s = self._retry.delay_s(error, attempt, elapsed_s, random.random())
                if delay_s is None or self._closed.wait(delay_s):
                    raise
            attempt += 1


def _typed(resource: Resource, manifest: Object) -> Object:
    return {"apiVersion": resource.api_version, "kind": resource.kind, **manifest}


def _are_objects(items: Any) -> bool:
    return isinstance(items, list) and all(isinstance(item, dict) for item in items)


def _selection(selector: str, fields: str) -> dict[str, str]:
    return {k: v for k, v in (("labelSelector", selector), ("fieldSelector", fields)) if v}

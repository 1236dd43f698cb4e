"""Open watches: changes, bookmarks and faults as streams."""

import asyncio
import json
import time
from typing import Any

from aiohttp import web

from tests.kubernetes.apiserver.definitions import Definition
from tests.kubernetes.apiserver.failure import Failure, expired
from tests.kubernetes.apiserver.faults import Fault
from tests.kubernetes.apiserver.store import Change, Store
from tests.kubernetes.apiserver.target import Target, selects

Object = dict[str, Any]

_LONGEST_WATCH_S = 3600.0


class OpenWatch:
    """A watch that is being answered."""

    def __init__(self, fault: Fault | None) -> None:
        self.fault = fault
        """What ends it, once there is something."""
        self.told_version = 0
        """Version that its client has from events and bookmarks."""
        self._ending = asyncio.Event()

    def end(self, fault: Fault) -> None:
        self.fault = fault
        self._ending.set()

    async def ending(self) -> None:
        await self._ending.wait()


class Watches:
    """The watches of one server."""

    def __init__(self, store: Store, *, bookmark_s: float) -> None:
        self._store, self._bookmark_s = store, bookmark_s
        self._open: set[OpenWatch] = set()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def told_version(self) -> int:
        """Oldest version that a client of an open watch has."""
        return min((watch.told_version for watch in self._open), default=0)

    def end(self, fault: Fault) -> None:
        """End all open watches as a fault says."""
        for watch in self._open:
            watch.end(fault)

    async def answer(
        self, request: web.Request, target: Target, fault: Fault | None, entry: Object
    ) -> web.StreamResponse:
        """Answer a watch until it ends; its record gets the code of a failure."""
        query = request.query
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        watch = OpenWatch(fault)
        self._open.add(watch)
        try:
            await self._stream(response, target, query, watch)
        except Failure as failure:
            entry["code"] = failure.code
            await _send(response, "ERROR", failure.status())
        except ConnectionError:
            return response
        finally:
            self._open.discard(watch)
        if watch.fault is not None and watch.fault.kind == "break_watch":
            return drop(request)
        await response.write_eof()
        return response

    async def _stream(self, response: web.StreamResponse, target: Target, query: Any, watch: OpenWatch) -> None:
        deadline = time.monotonic() + float(query.get("timeoutSeconds") or _LONGEST_WATCH_S)
        has_bookmarks = query.get("allowWatchBookmarks") in ("true", "1")
        version = watch.told_version = int(query.get("resourceVersion") or 0)
        if version == 0:
            version = self._store.version
            for value in self._store.collection(target.definition.name, target.namespace):
                if selects(target, query, value):
                    await _send(response, "ADDED", value)
        bookmark_at = time.monotonic() + self._bookmark_s
        while True:
            if watch.fault is not None:
                if watch.fault.kind == "expire_watch":
                    raise expired("The resourceVersion for the provided watch is too old.")
                return
            for change in self._store.changes(version):
                version = change.version
                if (event := _event(target, query, change)) is not None:
                    await _send(response, event, change.object)
                    watch.told_version = version
                if watch.fault is not None:
                    break
            now = time.monotonic()
            if has_bookmarks and (now >= bookmark_at or now >= deadline):
                bookmark_at = now + self._bookmark_s
                await _send(response, "BOOKMARK", _bookmark(target.definition, version))
                watch.told_version = version
            if now >= deadline:
                return
            await _first(self._store.changed(version), watch.ending(), timeout_s=min(bookmark_at, deadline) - now)


def _event(target: Target, query: Any, change: Change) -> str | None:
    """Type of a change as a watch with these selectors sees it; None if it does not."""
    key = change.key
    if key.resource != target.definition.name or target.namespace not in ("", key.namespace):
        return None
    is_in = change.type != "DELETED" and selects(target, query, change.object)
    was_in = change.previous is not None and selects(target, query, change.previous)
    if is_in:
        return "MODIFIED" if was_in else "ADDED"
    return "DELETED" if was_in else None


def _bookmark(definition: Definition, version: int) -> Object:
    metadata = {"resourceVersion": str(version), "creationTimestamp": None}
    return {"kind": definition.kind, "apiVersion": definition.api_version, "metadata": metadata}


async def _send(response: web.StreamResponse, event: str, value: Object) -> None:
    await response.write(json.dumps({"type": event, "object": value}).encode() + b"\n")


async def _first(*waits: Any, timeout_s: float) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=max(0.0, timeout_s), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def drop(request: web.Request) -> web.Response:
    """Close the connection without an answer."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()

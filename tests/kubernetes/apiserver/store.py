"""Objects with their versions and history, kept in a file that survives SIGKILL."""

import asyncio
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tests.kubernetes.apiserver.failure import expired

Object = dict[str, Any]
ChangeType = Literal["ADDED", "MODIFIED", "DELETED"]


class Key(NamedTuple):
    """Place of an object: resource with its group, namespace (empty for cluster scope), name."""

    resource: str
    namespace: str
    name: str


@dataclass(frozen=True)
class Change:
    """One write: the object as written, and as it was before."""

    version: int
    type: ChangeType
    key: Key
    object: Object
    previous: Object | None


class Store:
    """Objects and the changes since the last compaction. One thread."""

    def __init__(self, path: Path | None = None) -> None:
        """Read the file, if it exists, and append every change to it."""
        self.version = 0
        self.compacted = 0
        """Newest version whose change is no longer in the history."""
        self._objects: dict[Key, Object] = {}
        self._history: list[Change] = []
        self._dependents: dict[str, set[Key]] = defaultdict(set)
        self._waiting: list[asyncio.Future[None]] = []
        self._log = None
        if path is not None:
            if path.exists():
                self._replay(path)
            self._log = path.open("ab", buffering=0)

    def _replay(self, path: Path) -> None:
        for line in path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                path.write_bytes(path.read_bytes()[: -len(line)])  # a write that SIGKILL cut off was never answered
                break
            entry = json.loads(line)
            if "compact" in entry:
                self._forget(entry["compact"])
            else:
                self._record(entry["type"], Key(*entry["key"]), entry["object"])

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def get(self, key: Key) -> Object | None:
        return self._objects.get(key)

    def all_keys(self) -> list[Key]:
        return list(self._objects)

    def dependents(self, uid: str) -> list[Key]:
        """Objects that name this owner."""
        return sorted(self._dependents.get(uid, ()))

    def write(self, type: ChangeType, key: Key, value: Object) -> Object:
        """Record a change under the next version, which the object gets; return the object."""
        metadata = {**value["metadata"], "resourceVersion": str(self.version + 1)}
        value = {**value, "metadata": metadata}
        if self._log is not None:
            self._log.write(json.dumps({"type": type, "key": key, "object": value}).encode() + b"\n")
        self._record(type, key, value)
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()
        return value

    def _record(self, type: ChangeType, key: Key, value: Object) -> None:
        self.version += 1
        previous = self._objects.pop(key, None)
        if previous is not None:
            for owner in previous["metadata"].get("ownerReferences", ()):
                self._dependents[owner["uid"]].discard(key)
        if type != "DELETED":
            self._objects[key] = value
            for owner in value["metadata"].get("ownerReferences", ()):
                self._dependents[owner["uid"]].add(key)
        self._history.append(Change(self.version, type, key, value, previous))

    def compact(self, version: int | None = None) -> None:
        """Forget the changes up to a version, by default all."""
        version = self.version if version is None else version
        if self._log is not None:
            self._log.write(json.dumps({"compact": version}).encode() + b"\n")
        self._forget(version)

    def _forget(self, version: int) -> None:
        del self._history[: max(0, version - self.compacted)]
        self.compacted = max(self.compacted, version)

    def changes(self, after: int) -> list[Change]:
        """Changes after a version. Raises Failure (410) if some are forgotten."""
        if after < self.compacted:
            raise expired(f"too old resource version: {after} ({self.compacted + 1})")
        return self._history[after - self.compacted :]

    async def changed(self, after: int) -> None:
        """Wait for a change after a version."""
        if self.version <= after:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future

    def collection(self, resource: str, namespace: str, version: int | None = None) -> list[Object]:
        """Objects of a resource in the order of their keys, as of a version. An empty namespace means all."""
        objects = self._objects
        if version is not None and version < self.version:
            objects = dict(objects)
            for change in reversed(self.changes(version)):
                if change.previous is None:
                    objects.pop(change.key, None)
                else:
                    objects[change.key] = change.previous
        matching = [k for k in objects if k.resource == resource and namespace in ("", k.namespace)]
        return [objects[key] for key in sorted(matching)]

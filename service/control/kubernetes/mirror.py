"""Copy of the watched objects of one namespace, kept current by watches."""

import time
from collections.abc import Callable, Sequence
from threading import RLock

from service.control.kubernetes.api import KubernetesApi
from service.control.kubernetes.reflector import Reflector
from service.control.kubernetes.resource import EVENTS, Object, Resource
from service.control.kubernetes.retry import Backoff
from service.control.kubernetes.table import Table
from service.control.kubernetes.watched import WATCHED, WatchedResource, submission_of

CLOSE_TIMEOUT_S = 5.0


class Mirror:
    """Pruned objects of some resources, each followed by a thread of its own.

    Lookups answer from memory and may be made from any thread. Objects are shared: they must not be changed. After a
    re-list, and whenever a watch is broken, objects may be out of date, which `in_sync` says.
    """

    def __init__(
        self,
        api: KubernetesApi,
        watched: Sequence[WatchedResource] = WATCHED,
        *,
        on_change: Callable[[Resource, str], None] = lambda resource, submission: None,
        clock: Callable[[], float] = time.time,
        backoff: Backoff | None = None,
    ) -> None:
        """`on_change` is called with the resource and the submission label of a changed object, on its thread;
        it must return at once. The label of an object without one is that of its owner, or of the object that an event
        is about; empty if that is unknown."""
        self._lock = RLock()
        self._on_change = on_change
        self._tables = {entry.resource: Table(entry.most_per_object) for entry in watched}
        self._tables_by_kind = {resource.kind: table for resource, table in self._tables.items()}
        self._reflectors = {
            entry.resource: Reflector(
                api,
                entry,
                self._tables[entry.resource],
                lock=self._lock,
                on_change=self._note_change,
                clock=clock,
                backoff=backoff or Backoff(),
            )
            for entry in watched
        }

    def _note_change(self, resource: Resource, value: Object) -> None:
        with self._lock:
            submission = submission_of(value) or self._submission_of_related(value)
        self._on_change(resource, submission)

    def _submission_of_related(self, value: Object) -> str:
        """Label of an owner or of the object that an event is about, as far as it is mirrored."""
        related = [*(value["metadata"].get("ownerReferences") or ()), value.get("involvedObject") or {}]
        for reference in related:
            table = self._tables_by_kind.get(reference.get("kind", ""))
            other = table.get(reference["name"]) if table is not None else None
            if other is not None and other["metadata"]["uid"] == reference.get("uid"):
                return submission_of(other)
        return ""

    def start(self) -> None:
        """Start one thread per resource."""
        for reflector in self._reflectors.values():
            reflector.start()

    def close(self) -> None:
        """End the threads."""
        for reflector in self._reflectors.values():
            reflector.stop()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for reflector in self._reflectors.values():
            reflector.join(max(0.0, deadline - time.monotonic()))

    def objects(self, resource: Resource, submission: str) -> tuple[Object, ...]:
        """Objects whose submission label has this value."""
        with self._lock:
            return self._tables[resource].by_submission(submission)

    def owned(self, resource: Resource, owner_uid: str) -> tuple[Object, ...]:
        """Objects that name this owner."""
        with self._lock:
            return self._tables[resource].by_owner(owner_uid)

    def events(self, uid: str) -> tuple[Object, ...]:
        """The newest events about the object with this uid, in order of arrival."""
        with self._lock:
            return self._tables[EVENTS].by_involved_object(uid)

    def get(self, resource: Resource, name: str) -> Object | None:
        with self._lock:
            return self._tables[resource].get(name)

    def all(self, resource: Resource) -> tuple[Object, ...]:
        with self._lock:
            return self._tables[resource].all()

    @property
    def in_sync(self) -> bool:
        """Whether every resource was listed and is being watched."""
        return self.out_of_sync_since is None

    @property
    def out_of_sync_since(self) -> float | None:
        """Time (of `clock`) at which the first of the broken watches broke, or its first list began; None in sync."""
        times = [r.out_of_sync_since for r in self._reflectors.values()]
        return min((t for t in times if t is not None), default=None)

    @property
    def has_listed(self) -> bool:
        """Whether every resource was listed at least once: before, an object that is missing may exist."""
        return all(reflector.has_listed for reflector in self._reflectors.values())

    @property
    def error(self) -> Exception | None:
        """Failure of the resource that is out of sync longest; None in sync, or before the first attempt ended."""
        broken = [r for r in self._reflectors.values() if r.out_of_sync_since is not None and r.error is not None]
        return min(broken, key=lambda r: r.out_of_sync_since or 0.0).error if broken else None

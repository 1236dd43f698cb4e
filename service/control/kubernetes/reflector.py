"""List and watch of one resource, which keep a table current (client-go's name for the same thing)."""

import random
import time
from collections.abc import Callable
from threading import Event, Lock, RLock, Thread

import structlog

from service.control.kubernetes.api import KubernetesApi
from service.control.kubernetes.errors import Gone
from service.control.kubernetes.prune import prune
from service.control.kubernetes.resource import Object, Resource
from service.control.kubernetes.retry import Backoff
from service.control.kubernetes.table import Table
from service.control.kubernetes.watch import Watch
from service.control.kubernetes.watched import WatchedResource, submission_of

SHORT_WATCH_S = 1.0
"""A watch that ends sooner without an event is followed by a delay, like a failure."""
log = structlog.get_logger(__name__)


class Reflector:
    """Keeps one table equal to its collection on the API server: one list in pages, then watches from its version.

    Only a version that the server dropped (410) leads to another list, during which lookups see the old objects.
    """

    def __init__(
        self,
        api: KubernetesApi,
        watched: WatchedResource,
        table: Table,
        *,
        lock: RLock,
        on_change: Callable[[Resource, Object], None],
        clock: Callable[[], float],
        backoff: Backoff,
    ) -> None:
        self._backoff = backoff
        self._api, self._watched, self._table = api, watched, table
        self._lock, self._on_change, self._clock = lock, on_change, clock
        self._stopping = Event()
        self._watch_lock = Lock()
        self._watch: Watch | None = None
        self._version: str | None = None
        self._thread = Thread(target=self._run, name=f"watch-{watched.resource.plural}", daemon=True)
        self.out_of_sync_since: float | None = clock()
        self.has_listed = False
        self.error: Exception | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the open watch and the thread; does not wait for it."""
        self._stopping.set()
        with self._watch_lock:
            if self._watch is not None:
                self._watch.close()

    def join(self, timeout_s: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            started_at = time.monotonic()
            try:
                if self._version is None:
                    self._list()
                had_events = self._follow()
                is_short = not had_events and time.monotonic() - started_at < SHORT_WATCH_S
                failures = failures + 1 if is_short else 0
            except Gone as error:
                log.info("listing again: the watched version is gone", resource=self._name, error=str(error))
                self._version = None
                self._set_out_of_sync(error)
                failures += 1
            except Exception as error:  # without this thread, objects would be out of date and count as current
                if not self._stopping.is_set():
                    self._set_out_of_sync(error)
                    failures += 1
                    if failures == 2:  # one failure is a server that was replaced
                        log.warning("objects may be out of date", resource=self._name, error=str(error) or repr(error))
            if failures:
                self._stopping.wait(self._backoff.delay_s(failures - 1, random.random()))

    @property
    def _name(self) -> str:
        return self._watched.resource.name

    def _set_out_of_sync(self, error: Exception) -> None:
        self.error = error
        if self.out_of_sync_since is None:
            self.out_of_sync_since = self._clock()

    def _set_in_sync(self) -> None:
        self.error = None
        self.out_of_sync_since = None

    def _list(self) -> None:
        """Replace the table by the server's objects, and take the version of the list."""
        watched = self._watched
        names: set[str] = set()
        cursor, version = "", None
        while version is None or cursor:
            page = self._api.list_page(
                watched.resource, selector=watched.label_selector, fields=watched.field_selector, cursor=cursor
            )
            # Objects of all pages have the version of the first.
            version, cursor = page.resource_version, page.cursor
            for value in page.items:
                names.add(value["metadata"]["name"])
                self._put(prune(value, watched.fields))
        with self._lock:
            removed = [self._table.remove(name) for name in self._table.names() - names]
        for old in removed:
            if old is not None:
                self._on_change(watched.resource, old)
        self._version = version
        self.has_listed = True

    def _follow(self) -> bool:
        """Apply the events of one watch until it ends; return whether there was one."""
        assert self._version is not None
        watched = self._watched
        watch = self._api.watch(
            watched.resource, self._version, selector=watched.label_selector, fields=watched.field_selector
        )
        with self._watch_lock:
            self._watch = watch
            if self._stopping.is_set():
                watch.close()
        self._set_in_sync()
        had_events = False
        try:
            for event in watch:
                had_events = True
                if event.type == "DELETED":
                    self._remove(event.object)
                elif event.type != "BOOKMARK":
                    self._put(prune(event.object, watched.fields))
                self._version = event.resource_version
        finally:
            with self._watch_lock:
                self._watch = None
        return had_events

    def _put(self, value: Object) -> None:
        name = value["metadata"]["name"]
        with self._lock:
            old = self._table.get(name)
            if old is not None and old["metadata"]["resourceVersion"] == value["metadata"]["resourceVersion"]:
                return
            self._table.put(value)
        self._notify(value, old)

    def _remove(self, value: Object) -> None:
        with self._lock:
            old = self._table.remove(value["metadata"]["name"])
        self._notify(value, old)

    def _notify(self, value: Object, old: Object | None) -> None:
        self._on_change(self._watched.resource, value)
        if old is not None and submission_of(old) != submission_of(value):
            self._on_change(self._watched.resource, old)

"""The migrated database, transactions on it, and errors of a full disk."""

import errno
import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, Engine, PoolProxiedConnection, create_engine, event, make_url, text
from sqlalchemy.exc import DBAPIError, OperationalError

from service.control.errors import Full, ServiceError, Unavailable
from service.control.store.open_file import OpenFile

BUSY_TIMEOUT_MS = 10_000
_MIGRATIONS = Path(__file__).parent / "migrations"
_MIGRATION_LOCK = 0x5A4D  # arbitrary, but the same in every release


class NewerDatabase(Exception):
    """Database that a newer release has migrated."""


class WriteConflict(Unavailable):
    """A row that another control plane stored at the same moment. Repeated, the request meets that row."""


class Database:
    """Reads see one snapshot; writes are durable at their block's end, or rolled back."""

    def __init__(self, url: str) -> None:
        """Raises SQLAlchemyError for an invalid URL, ModuleNotFoundError if its driver is not installed."""
        self.url = _with_driver(make_url(url))
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self._engine = _sqlite_engine(self.url) if self.is_sqlite else _server_engine(self.url)
        # SQLite has one writer. This lock waits fairly and cheaply; SQLite itself would poll.
        self._writing = threading.Lock()
        # SQLite releases the GIL at every row, so that many concurrent readers would all finish late.
        one_reader = threading.Lock() if self.is_sqlite else nullcontext()
        self.fault: ServiceError | None = None
        """Reason why the last write failed for lack of space or response; None if it succeeded."""
        self._reading_many: AbstractContextManager[Any] = one_reader
        self._file: OpenFile | None = None
        self._anchor: PoolProxiedConnection | None = None
        self._is_gone = False

    def migrate(self, target: str | None = None) -> tuple[str | None, str]:
        """Migrate the tables to the revision `target`, by default this release's, one transaction per migration; waits
        for other processes. Returns the revisions before and after. Raises NewerDatabase, also for a `target` that this
        release does not know."""
        config = Config()
        config.set_main_option("script_location", str(_MIGRATIONS))
        scripts = ScriptDirectory.from_config(config)
        newest = scripts.get_current_head()
        assert newest is not None, "there are migrations"
        known_revisions = {None, *(script.revision for script in scripts.walk_revisions())}
        if self.is_sqlite and self.url.database:
            _make_private(self.url.database)
        with self._migration_lock(), self._engine.connect() as connection:
            earlier_revision = MigrationContext.configure(connection).get_current_revision()
            for revision in (earlier_revision, target):
                if revision not in known_revisions:
                    raise NewerDatabase(
                        f"tables of revision {revision} are those of a newer release than this one (revision "
                        f"{newest}); use that release, or restore a backup of this one's"
                    )
            connection.rollback()  # the migrations begin their own transactions
            config.attributes["connection"] = connection
            command.upgrade(config, target or "head")
        if self.is_sqlite and self.url.database:
            # Kept until `close`: SQLite removes its log when the last connection closes.
            if self._anchor is None:
                self._anchor = self._engine.raw_connection()
            self._file = OpenFile(self.url.database)
        return earlier_revision, target or newest

    def revision(self) -> str | None:
        """Revision of the tables; None if there are none."""
        with self._engine.connect() as connection:
            return MigrationContext.configure(connection).get_current_revision()

    def look(self) -> None:
        """Check that the file at the path is the open one. Raises Unavailable if it was moved, removed or replaced:
        later commits would be lost."""
        if self._file is None:
            return
        fault = self._file.fault()
        if fault is not None:
            if not self._is_gone:
                self._rescue()
            self._is_gone, self.fault = True, fault
            raise fault
        if self._is_gone:  # moved back
            self._is_gone, self.fault = False, None

    def _rescue(self) -> None:
        """Checkpoint the log into the database file, wherever that is now."""
        assert self._anchor is not None
        with suppress(sqlite3.Error), closing(self._anchor.cursor()) as cursor:
            cursor.execute("PRAGMA wal_checkpoint(PASSIVE)")

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A read transaction. Raises Unavailable as `look` does."""
        self.look()
        with self._engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """As `read`, with one snapshot for all its queries, however long they take."""
        self.look()
        with self._engine.connect() as connection:
            if not self.is_sqlite:
                connection = connection.execution_options(isolation_level="REPEATABLE READ")
            with connection.begin():
                yield connection

    @contextmanager
    def read_many(self) -> Iterator[Connection]:
        """As `read`, for frequent queries of many rows."""
        with self._reading_many, self.read() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A write transaction. Raises Full or Unavailable if the database cannot be written, or is no longer at its
        path, WriteConflict."""
        self.look()
        was_failing = self.fault is not None
        if was_failing:
            self._discard_idle_connections()
        try:
            with self._transaction() as connection:
                yield connection
                self.look()  # again right before the commit
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) == _POSTGRES_NOT_UNIQUE:
                raise WriteConflict("another request stored the same at this moment; repeat this one") from error
            refusal = in_words(error)
            if refusal is None:
                raise
            self.fault = refusal
            raise refusal from None
        if was_failing:
            self._discard_idle_connections()
        self.fault = None

    def _discard_idle_connections(self) -> None:
        """Have later transactions open the file anew: SQLite opens a file that cannot be written for reading only, and
        such a connection stays so."""
        if self.is_sqlite and self.url.database:
            self._engine.dispose()

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        if not self.is_sqlite:
            with self._engine.begin() as connection:
                yield connection
            return
        with self._writing, self._engine.connect() as connection:
            connection.execution_options(shardyard_write=True)
            with connection.begin():
                yield connection

    def close(self) -> None:
        if self._anchor is not None:
            self._anchor.close()
            self._anchor = self._file = None
        self._engine.dispose()

    @contextmanager
    def _migration_lock(self) -> Iterator[None]:
        """Lock that excludes migrations by other processes."""
        if self.is_sqlite:
            if not self.url.database:
                yield
                return
            with open(os.open(f"{self.url.database}.migrating", os.O_RDWR | os.O_CREAT, 0o600), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
            return
        with self._engine.connect() as connection:
            connection.execute(text("SELECT pg_advisory_lock(:lock)"), {"lock": _MIGRATION_LOCK})
            try:
                yield
            finally:
                connection.execute(text("SELECT pg_advisory_unlock(:lock)"), {"lock": _MIGRATION_LOCK})


def _make_private(database: str) -> None:
    """Restrict the database's files to their owner; SQLite's later ones inherit the first one's mode."""
    Path(database).touch(0o600)
    for path in map(Path, (database, f"{database}-wal", f"{database}-shm", f"{database}.migrating")):
        if path.exists():
            path.chmod(0o600)


def _with_driver(url: URL) -> URL:
    """URL with the driver that this project installs, if it names none."""
    return url.set(drivername="postgresql+psycopg") if url.drivername in ("postgres", "postgresql") else url


def _server_engine(url: URL) -> Engine:
    # A connection that the server has closed is replaced before it is used.
    return create_engine(url, pool_pre_ping=True)


def _sqlite_engine(url: URL) -> Engine:
    # Few connections, since each has its own cache; callers wait for a free one.
    engine = create_engine(url, pool_size=9, max_overflow=0, pool_timeout=60)

    @event.listens_for(engine, "connect")
    def set_up(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # transactions are begun below, not implicitly by the driver
        for pragma in (
            f"busy_timeout={BUSY_TIMEOUT_MS}",
            "journal_mode=WAL",
            "synchronous=FULL",  # commits are on disk before they return
            "foreign_keys=ON",
        ):
            connection.execute(f"PRAGMA {pragma}").close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # Writes lock at once: a transaction that starts by reading would fail, not wait, if the lock is taken.
        writes = connection.get_execution_options().get("shardyard_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_POSTGRES_DISK_FULL = "53100"
_POSTGRES_NOT_UNIQUE = "23505"
REMEDY = "stored data stays readable; free some space, and try again"


def is_full(error: OSError) -> bool:
    """Whether a file could not be written for lack of space."""
    return error.errno in _NO_ROOM


def in_words(error: DBAPIError) -> ServiceError | None:
    """Full or Unavailable; None for a bug of this service."""
    code = getattr(error.orig, "sqlite_errorcode", None)
    if not isinstance(error, OperationalError) or code == sqlite3.SQLITE_ERROR:  # the latter: no such table
        return None
    reason = str(error.orig).splitlines()[0]
    if code == sqlite3.SQLITE_FULL or getattr(error.orig, "sqlstate", None) == _POSTGRES_DISK_FULL:
        return Full(f"no space left for the database ({reason}); {REMEDY}")
    if code is not None and code & 0xFF in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR):  # primary result code
        return Unavailable(
            f"the database is not writable ({reason}): its disk, folder or file is read-only or "
            "failing; stored data stays readable; make it writable and try again",
            headers={"retry-after": "5"},
        )
    return Unavailable(
        f"the database is temporarily unavailable ({reason}); try again later", headers={"retry-after": "5"}
    )

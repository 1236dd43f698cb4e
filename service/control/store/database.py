"""A database that is up to date, and transactions on it."""

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
from sqlalchemy import Connection, Engine, PoolProxiedConnection, create_engine, event, make_url, text
from sqlalchemy.exc import DBAPIError

from service.control.errors import ServiceError
from service.control.store.full_disk import in_words
from service.control.store.open_file import OpenFile

BUSY_TIMEOUT_MS = 10_000
_MIGRATIONS = Path(__file__).parent / "migrations"
_MIGRATION_LOCK = 0x5A4D  # any number, the same in every release


class Database:
    """Reads see one snapshot; writes are durable when their block ends, and undone when it raises."""

    def __init__(self, url: str) -> None:
        self.url = make_url(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self._engine = _sqlite_engine(url) if self.is_sqlite else create_engine(url, pool_pre_ping=True)
        # SQLite has one writer. Waiting for it in line here is fair and cheap; its own waiting is a poll.
        self._writing = threading.Lock()
        # At each row it hands the interpreter over: of many readers at a time, all would end late.
        one_reader = threading.Lock() if self.is_sqlite else nullcontext()
        self.fault: ServiceError | None = None
        """Reason why the last write failed for want of room or of an answer; None when it did not."""
        self._reading_many: AbstractContextManager[Any] = one_reader
        self._file: OpenFile | None = None
        self._anchor: PoolProxiedConnection | None = None
        self._is_gone = False

    def migrate(self) -> None:
        """Brings the tables to this release, a transaction each; waits while another process does."""
        config = Config()
        config.set_main_option("script_location", str(_MIGRATIONS))
        if self.is_sqlite and self.url.database:
            _make_private(self.url.database)
        with self._alone(), self._engine.connect() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
        if self.is_sqlite and self.url.database:
            # Held to the end: SQLite removes its log with the last connection that is closed.
            if self._anchor is None:
                self._anchor = self._engine.raw_connection()
            self._file = OpenFile(self.url.database)

    def look(self) -> None:
        """Returns if the file at the database's path is the one that is open. Raises Unavailable where it was moved,
        removed or replaced: what would be committed then, nobody would find."""
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
        """Moves what is committed from the log into the database, under whatever name that is by now."""
        assert self._anchor is not None
        with suppress(sqlite3.Error), closing(self._anchor.cursor()) as cursor:
            cursor.execute("PRAGMA wal_checkpoint(PASSIVE)")

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Raises Unavailable as `look` does."""
        self.look()
        with self._engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def read_many(self) -> Iterator[Connection]:
        """As `read`, for frequent queries of many rows."""
        with self._reading_many, self.read() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Raises Full or Unavailable where the database can take nothing now, or is no more at its path."""
        self.look()
        try:
            with self._transaction() as connection:
                yield connection
                self.look()  # the last moment before it is committed
        except DBAPIError as error:
            refusal = in_words(error)
            if refusal is None:
                raise
            self.fault = refusal
            raise refusal from None
        self.fault = None

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
    def _alone(self) -> Iterator[None]:
        """No other process migrates this database meanwhile."""
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
    """Lets nobody but their owner read or write the files of a database, made now or by another release; those that
    SQLite makes later beside the first get its permissions."""
    Path(database).touch(0o600)
    for path in map(Path, (database, f"{database}-wal", f"{database}-shm", f"{database}.migrating")):
        if path.exists():
            path.chmod(0o600)


def _sqlite_engine(url: str) -> Engine:
    # Connections are few, for each has a cache of its own; who finds none free waits for one.
    engine = create_engine(url, pool_size=9, max_overflow=0, pool_timeout=60)

    @event.listens_for(engine, "connect")
    def set_up(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # transactions are begun below, not guessed by the driver
        for pragma in (
            f"busy_timeout={BUSY_TIMEOUT_MS}",
            "journal_mode=WAL",
            "synchronous=FULL",  # a commit is on the disk before it is acknowledged
            "foreign_keys=ON",
        ):
            connection.execute(f"PRAGMA {pragma}").close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A write takes its lock at once: one that began by reading could find it taken and fail, not wait.
        writes = connection.get_execution_options().get("shardyard_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine

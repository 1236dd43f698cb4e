"""Backups of the database: the rows of all tables at one moment, on any storage, from and for any database.

A backup is a folder with the rows of each table as compressed JSON lines, the key of attempts if that is a file, and
`backup.json`, which is written last and seals the others. Rows are read back into tables of the backup's revision,
which are then migrated, so that a newer release restores an older backup.
"""

import gzip
import io
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from typing import Any, Literal

from pydantic import ValidationError
from sqlalchemy import Connection, MetaData, Table, func, insert, select, text

from moe.spec.base import Frozen
from moe.storage import sealing
from moe.storage.folder import Folder
from moe.storage.sealing import SealingStream
from moe.train.checkpoint.marker import FileSeal
from service.control.store.clock import now_us
from service.control.store.database import Database
from service.control.store.leases import lease_holder

MANIFEST = "backup.json"
KEY = "attempt.key"
ABANDONED_AFTER = timedelta(days=1)
"""Age of a backup without a manifest at which nobody writes it any more."""
_NAME_FORMAT = "shardyard-%Y%m%dT%H%M%S.%fZ"
_NAME = re.compile(r"shardyard-\d{8}T\d{6}\.\d{6}Z")
_NOT_STORED = frozenset({"alembic_version", "leases", "curve_chunks"})
"""The first is in the manifest; the second is about running processes; the third is packed again from events."""
_ROWS_AT_A_TIME = 500


class BackupError(Exception):
    """Backup that cannot be restored, or database that it cannot be restored into."""


class Manifest(Frozen):
    """Contents of a backup."""

    version: Literal[1] = 1
    release: str
    """Version of Shardyard."""
    revision: str
    """Migration that the tables are at."""
    created_at: str
    rows: dict[str, int]
    """Number of rows by table."""
    last_numbers: dict[str, int]
    """Last number that was assigned in a table, also if the row was deleted since."""
    files: dict[str, FileSeal]


def write_backup(database: Database, parent: Folder, key: bytes | None) -> tuple[str, Manifest]:
    """Write a backup into a new folder in `parent`, also while control planes run; return the name of the folder and
    its contents. Raises OSError."""
    created_at = datetime.now(UTC)
    name = created_at.strftime(_NAME_FORMAT)
    folder = parent.subfolder(name)
    rows, files = dict[str, int](), dict[str, FileSeal]()
    with database.snapshot() as tx:
        revision = str(tx.execute(text("SELECT version_num FROM alembic_version")).scalar_one())
        for table in _tables(tx):
            path = f"{table.name}.jsonl.gz"
            rows[table.name], files[path] = _write_table(tx, table, folder, path)
        last_numbers = _last_numbers(database, tx)
    if key is not None:
        files[KEY] = _write(folder, KEY, key)
    manifest = Manifest(
        release=version("shardyard"), revision=revision, created_at=created_at.isoformat(), rows=rows,
        last_numbers=last_numbers, files=files,
    )  # fmt: skip
    folder.write(MANIFEST, manifest.model_dump_json(indent=1).encode(), mode=0o600)
    return name, manifest


def list_backups(parent: Folder) -> list[str]:
    """Names of the complete backups in `parent`, newest first. Raises OSError."""
    names = sorted((name for name in parent.names() if _NAME.fullmatch(name)), reverse=True)
    return [name for name in names if MANIFEST in parent.names(name)]


def remove_older(parent: Folder, keep: int, now: datetime | None = None) -> list[str]:
    """Remove all but the newest `keep` backups, manifests first, and incomplete backups that were begun a day ago;
    return the names of the removed folders. Raises OSError."""
    older = list_backups(parent)[keep:]
    for name in older:
        parent.remove(f"{name}/{MANIFEST}")
        parent.remove(name)
    abandoned = _abandoned(parent, (now or datetime.now(UTC)) - ABANDONED_AFTER)
    for name in abandoned:
        parent.remove(name)
    return older + abandoned


def _abandoned(parent: Folder, before: datetime) -> list[str]:
    """Names of incomplete backups that were begun before this time."""
    names = [name for name in parent.names() if _NAME.fullmatch(name) and name < before.strftime(_NAME_FORMAT)]
    return sorted(name for name in names if MANIFEST not in parent.names(name))


def read_manifest(backup: Folder) -> Manifest:
    """Contents of a backup, whose files are complete and unchanged. Raises BackupError, OSError."""
    try:
        manifest = Manifest.model_validate_json(backup.read(MANIFEST))
    except FileNotFoundError:
        raise BackupError(f"{backup.url} is no backup: it has no {MANIFEST}") from None
    except ValidationError as error:
        raise BackupError(f"{backup.url}/{MANIFEST} is none of this release: {error.errors()[0]['msg']}") from None
    for path, seal in manifest.files.items():
        fault = sealing.fault(backup, path, seal.size_bytes, seal.sha256)
        if fault is not None:
            raise BackupError(f"{backup.url} is damaged: {fault}; restore another backup")
    return manifest


def read_backup(database: Database, backup: Folder, manifest: Manifest) -> bytes | None:
    """Fill an empty database with a backup's rows, and migrate it to this release; return the key if the backup has
    one. Raises OSError, and BackupError, with nothing changed, for a database that is in use."""
    revision = database.revision()
    if revision not in (None, manifest.revision):
        raise BackupError(
            f"the database has tables of revision {revision}, and the backup is of revision {manifest.revision}; "
            "restore it into a new database"
        )
    database.migrate(manifest.revision)
    with database.write() as tx:
        _require_unused(tx)
        for table in _tables(tx):
            tx.execute(table.delete())  # only keys have rows, of a control plane without jobs
            for rows in _read_rows(backup, f"{table.name}.jsonl.gz"):
                tx.execute(insert(table), rows)
            if (number := tx.execute(select(func.count()).select_from(table)).scalar_one()) != manifest.rows[
                table.name
            ]:
                raise BackupError(f"{number} rows of {table.name} instead of {manifest.rows[table.name]}")
        _set_last_numbers(database, tx, manifest.last_numbers)
    database.migrate()
    return backup.read(KEY) if KEY in manifest.files else None


def _tables(tx: Connection) -> list[Table]:
    """Tables to back up, in an order in which every table comes after the tables that it refers to."""
    metadata = MetaData()
    metadata.reflect(tx)
    return [table for table in metadata.sorted_tables if table.name not in _NOT_STORED]


def _require_unused(tx: Connection) -> None:
    if (holder := lease_holder(tx, now_us())) is not None:
        raise BackupError(f"the control plane {holder} uses this database; stop it first")
    for table in _tables(tx):
        if table.name != "keys" and tx.execute(select(table).limit(1)).first() is not None:
            raise BackupError(f"the database is not empty: it has rows in {table.name}; restore into a new one")


def _write_table(tx: Connection, table: Table, folder: Folder, path: str) -> tuple[int, FileSeal]:
    num_rows = 0
    with folder.create(path, mode=0o600) as stream:
        sealing_stream = SealingStream(stream)
        with gzip.GzipFile(fileobj=sealing_stream, mode="wb", mtime=0, compresslevel=3) as file:
            order = [*table.primary_key.columns]
            for row in tx.execution_options(stream_results=True).execute(
                select(table).order_by(*order), execution_options={"yield_per": _ROWS_AT_A_TIME}
            ):
                file.write(json.dumps(row._asdict(), separators=(",", ":")).encode() + b"\n")
                num_rows += 1
    return num_rows, FileSeal(size_bytes=sealing_stream.size_bytes, sha256=sealing_stream.sha256)


def _write(folder: Folder, path: str, content: bytes) -> FileSeal:
    with folder.create(path, mode=0o600) as stream:
        sealing_stream = SealingStream(stream)
        sealing_stream.write(content)
    return FileSeal(size_bytes=sealing_stream.size_bytes, sha256=sealing_stream.sha256)


def _read_rows(backup: Folder, path: str) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    with backup.open(path) as stream, gzip.GzipFile(fileobj=stream) as file:
        for line in io.BufferedReader(file):
            rows.append(json.loads(line))
            if len(rows) == _ROWS_AT_A_TIME:
                yield rows
                rows = []
    if rows:
        yield rows


def _last_numbers(database: Database, tx: Connection) -> dict[str, int]:
    if database.is_sqlite:
        return {name: int(number) for name, number in tx.execute(text("SELECT name, seq FROM sqlite_sequence"))}
    sequence = tx.execute(text("SELECT pg_get_serial_sequence('jobs', 'number')")).scalar_one()
    number, is_called = tx.execute(text(f"SELECT last_value, is_called FROM {sequence}")).one()
    return {"jobs": int(number)} if is_called else {}


def _set_last_numbers(database: Database, tx: Connection, last_numbers: dict[str, int]) -> None:
    if (number := last_numbers.get("jobs")) is None:
        return
    if database.is_sqlite:
        tx.execute(text("DELETE FROM sqlite_sequence WHERE name = 'jobs'"))
        tx.execute(text("INSERT INTO sqlite_sequence (name, seq) VALUES ('jobs', :number)"), {"number": number})
    else:
        tx.execute(text("SELECT setval(pg_get_serial_sequence('jobs', 'number'), :number)"), {"number": number})

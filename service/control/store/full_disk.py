"""Errors of a full database or disk as ServiceErrors."""

import errno
import sqlite3

from sqlalchemy.exc import DBAPIError, OperationalError

from service.control.errors import Full, ServiceError, Unavailable

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_POSTGRES_DISK_FULL = "53100"
REMEDY = "stored data stays readable; free some space, and try again"


def is_full(error: OSError) -> bool:
    """Whether a file could not be written for lack of space."""
    return error.errno in _NO_ROOM


def in_words(error: DBAPIError) -> ServiceError | None:
    """Full or Unavailable; None for a bug of this service."""
    code = getattr(error.orig, "sqlite_errorcode", None)
    if not isinstance(error, OperationalError) or code == sqlite3.SQLITE_ERROR:  # the latter: no such table
        return None
    why = str(error.orig).splitlines()[0]
    if code == sqlite3.SQLITE_FULL or getattr(error.orig, "sqlstate", None) == _POSTGRES_DISK_FULL:
        return Full(f"no space left for the database ({why}); {REMEDY}")
    if code is not None and code & 0xFF in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR):  # primary result code
        return Unavailable(
            f"the database is not writable ({why}): its disk, folder or file is read-only or "
            "failing; stored data stays readable; make it writable and try again",
            headers={"retry-after": "5"},
        )
    return Unavailable(
        f"the database is temporarily unavailable ({why}); try again later", headers={"retry-after": "5"}
    )

"""Errors of object stores as OSErrors that name the place, the store's reason and a remedy.

Clients of stores raise exceptions of their own for a lost connection or missing credentials, and OSErrors without an
error number for the store's answers. Callers of storage handle OSError alone.
"""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

_MISSING_BUCKET = "NoSuchBucket"
_FULL = frozenset({"InsufficientCapacity", "QuotaExceeded", "QuotaExceededException", "XMinioStorageFull", "507"})
"""Codes of stores that have no room, such as MinIO and Ceph."""
_BUSY = frozenset(
    {"429", "503", "RequestLimitExceeded", "ServiceUnavailable", "SlowDown", "Throttling", "ThrottlingException"}
)
_REFUSED = frozenset({"401", "403"})
_LOST = frozenset({errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.ENETUNREACH, errno.EPIPE})
_QUERY = re.compile(r"\?[^\s\"']*")


@contextmanager
def in_words(url: str) -> Iterator[None]:
    """Convert errors of the store at `url`. FileNotFoundError stays for a missing file; a missing bucket is another
    OSError (ENODEV), since what is in it is unknown."""
    try:
        yield
    except (NotImplementedError, NotADirectoryError, IsADirectoryError, FileExistsError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise  # already in words
        if (os_error := _to_os_error(error, url)) is None:
            raise
        raise os_error from error


@contextmanager
def upload_in_words(url: str) -> Iterator[None]:
    """Convert errors of an upload to `url`. What is missing is its bucket."""
    try:
        with in_words(url):
            yield
    except FileNotFoundError:
        raise missing_bucket(url) from None


def is_temporary(error: OSError) -> bool:
    """Whether a store is overloaded, away or slow, rather than refusing or missing something."""
    return error.errno in (errno.EBUSY, errno.EHOSTUNREACH, errno.ETIMEDOUT)


def missing_bucket(url: str) -> OSError:
    """Error of a bucket that does not exist."""
    return OSError(errno.ENODEV, "the bucket does not exist; create it, or correct the URL", url)


def _to_os_error(error: Exception, url: str) -> OSError | None:
    """OSError for an error of a store; None for one that stays."""
    code = _code(error)
    if code == _MISSING_BUCKET:
        return missing_bucket(url)
    if isinstance(error, FileNotFoundError):
        return None
    reason = _QUERY.sub("", (str(error).strip() or type(error).__name__).splitlines()[0])
    if code in _FULL:
        return OSError(errno.ENOSPC, f"the store has no room ({reason}); free some space, or raise the quota", url)
    if code in _BUSY:
        return OSError(errno.EBUSY, f"the store is overloaded ({reason}); it was asked several times", url)
    if isinstance(error, PermissionError) or "Credential" in type(error).__name__ or _is_refusal(error, code):
        remedy = "renew or grant the credentials of this process (environment, secret or workload identity)"
        return PermissionError(errno.EACCES, f"the store refuses access ({reason}); {remedy}", url)
    if isinstance(error, TimeoutError):
        return TimeoutError(errno.ETIMEDOUT, f"the store did not respond in time ({reason})", url)
    number = error.errno if isinstance(error, OSError) else errno.EHOSTUNREACH
    number = errno.EHOSTUNREACH if number in _LOST else number
    return OSError(number or errno.EIO, f"the store cannot be reached or failed ({reason})", url)


def _is_refusal(error: Exception, code: str) -> bool:
    """Whether the store denied access. gcsfs raises a bare OSError for code 403."""
    return code in _REFUSED or (type(error) is OSError and str(error).startswith("Forbidden"))


def _code(error: BaseException) -> str:
    """The store's own code of an error, from the exception or its causes; empty if it has none."""
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)
        if isinstance(response, dict) and (code := response.get("Error", {}).get("Code")):
            return str(code)
        if isinstance(number := getattr(cause, "code", None), int):  # gcsfs
            return str(number)
        cause = cause.__cause__
    return ""

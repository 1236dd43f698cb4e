"""Error messages for terminals and programs."""

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe.spec.errors import Problem

FAILED, MISUSE = 1, 2
DETACHED = 130
"""Exit code of a program ended by Ctrl-C: the job's outcome is unknown."""
_NOT_WRITTEN = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""Errors of writes to an open file, which do not name it."""


@dataclass(frozen=True)
class Failure:
    """A failed command."""

    text: str
    """Text for a terminal: one problem per line."""
    exit_code: int
    body: dict[str, Any]
    """JSON for programs: `detail`, and `errors` with the fields of each problem."""


class Misuse(Exception):
    """An invalid request; the message says how to correct it."""


class CommandError(Exception):
    """A valid request that failed."""


def explain(error: Exception) -> Failure | None:
    """Report of `error`; None for a bug, which gets its traceback."""
    if isinstance(error, Misuse):
        return _failure(str(error), MISUSE)
    if isinstance(error, CommandError):
        return _failure(str(error), FAILED)

    from service.client.errors import ApiError, BadToken, BadUrl, ClientError

    if isinstance(error, ApiError):
        text = str(error)
        if error.status in (401, 403):
            text += "; set SHARDYARD_TOKEN to the service's token"
        is_misuse = error.status in (400, 404, 410, 413, 422)
        return _failure(text, MISUSE if is_misuse else FAILED, error.problems)
    if isinstance(error, BadUrl | BadToken):
        return _failure(str(error), MISUSE)
    if isinstance(error, ClientError):
        return _failure(str(error), FAILED)
    if isinstance(error, UnicodeEncodeError) and error.encoding.replace("-", "") == "utf8":
        return _failure(f"{ascii(error.object)[:200]} is not UTF-8 text; encode it as UTF-8", MISUSE)
    if isinstance(error, UnicodeEncodeError):
        return _failure(
            f"{ascii(error.object)[:200]} cannot be encoded as {error.encoding}, the locale's "
            "encoding; use a UTF-8 locale (LC_ALL=C.UTF-8)",
            MISUSE,
        )
    if isinstance(error, OSError) and error.filename is not None:
        return _failure(f"{error.filename}: {error.strerror}", MISUSE)
    if isinstance(error, OSError) and error.errno in _NOT_WRITTEN:
        return _failure(f"cannot write the output: {error.strerror}", FAILED)
    from moe.spec.errors import SpecError  # last: this import takes as long as most commands

    return _failure(str(error), MISUSE, error.problems) if isinstance(error, SpecError) else None


def shorten_usage(error: Any) -> None:
    """Reword the message of an option's value, which comes from pydantic: `must be a whole number`."""
    for words, shorter in _USAGE_WORDS:
        error.message = error.message.replace(words, shorter)


_USAGE_WORDS = (
    ("Input should", "must"),
    (", unable to parse string as an integer", ""),
    (", unable to parse string as a number", ""),
    ("a valid integer", "a whole number"),
    ("a valid number", "a number"),
)


def usage_body(error: Any) -> dict[str, Any]:
    """JSON of an error of the option parser."""
    parameter = getattr(error, "param", None)
    name = getattr(error, "option_name", None) or _name_of(parameter)
    if hasattr(error, "option_name"):
        code, rule = "unknown_key", "is not an option of this command"
    elif hasattr(error, "param_type"):
        code, rule = "missing", "is required"
    else:
        code, rule = "invalid_value", error.message
    problem = {"code": code, "path": name, "value": None, "rule": rule, "remedy": "see --help"}
    return {"detail": error.format_message(), "errors": [problem]}


def _name_of(parameter: Any) -> str:
    """`--limit`, or `JOB` of an argument; empty for None."""
    name: str = "" if parameter is None else parameter.opts[0]
    return name if name.startswith("-") else name.upper()


def _failure(text: str, exit_code: int, problems: "Sequence[Problem]" = ()) -> Failure:
    if problems:
        from service.wire.problem_fields import problem_fields

        errors = [problem_fields(problem) for problem in problems]
    else:
        errors = []  # without a slow import
    body = {"detail": text, "errors": errors}
    return Failure("shardyard: " + text.replace("\n", "\n           "), exit_code, body)

"""Problems as plain data, for HTTP answers and `--json` output."""

import json
import math
import sys
from typing import Any

from moe.spec.errors import Problem


def problem_fields(problem: Problem, max_chars: int = sys.maxsize) -> dict[str, Any]:
    """`code`, `path`, `value`, `rule` and `remedy` as strict JSON, path and value cut to `max_chars`."""
    return {
        "code": problem.code,
        "path": _cut(problem.path, max_chars),
        "value": _plain_value(problem.value, max_chars),
        "rule": problem.rule,
        "remedy": problem.remedy,
    }


def _plain_value(value: Any, max_chars: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if abs(value) < 2**53:
            return value
        return _cut(str(value), max_chars) if abs(value) < 10**300 else "a huge number"
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return _cut(value, max_chars)
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return _cut(repr(value), max_chars)
    return value if len(text) <= max_chars else _cut(text, max_chars)


def _cut(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."

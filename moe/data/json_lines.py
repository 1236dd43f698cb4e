"""Objects of a JSON Lines file, one a line."""

import json

from moe.data.lines import Lines


def parsed(lines: Lines, number: int, line: str) -> dict[str, object]:
    """The object on a line. Raises SpecError, naming file and line, for what is none."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        rule = f"is not JSON: {error.msg} at column {error.colno}"
        raise lines.broken(number, rule, "write one JSON object a line") from None
    except (RecursionError, ValueError) as error:
        raise lines.broken(number, f"is not JSON: {error}", "write one JSON object a line") from None
    if not isinstance(row, dict):
        raise lines.broken(number, f"is {kind_of(row)}, not an object", "write one JSON object a line")
    return row


def kind_of(value: object) -> str:
    """A JSON value's kind, in words."""
    names = {type(None): "null", bool: "a boolean", list: "a list", dict: "an object", str: "a string"}
    return names.get(type(value), "a number")

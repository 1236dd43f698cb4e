"""Pydantic's validation errors as problems."""

from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from moe.spec.errors import Problem, ProblemCode, RuleError, SpecError

_TAGGED = {"model", "data", "optimizer", "attention"}
"""Discriminated parts: pydantic inserts their tags into locations."""
_MODELS = {"translation", "language", "module"}
"""Tags that begin the location of a model parsed alone."""
_WHOLE = "the spec"


def problems_of(error: ValidationError) -> list[Problem]:
    """A Problem, with path, value, rule and remedy, for each of pydantic's errors."""
    problems: list[Problem] = []
    for entry in error.errors(include_url=False):
        cause = entry.get("ctx", {}).get("error")
        if isinstance(cause, SpecError):
            location = entry["loc"][:-1] if entry["loc"][-1:] == ("router",) else entry["loc"]  # written flat
            place = _dotted_path(_without_tags(location))
            problems.extend(
                replace(problem, path=".".join(filter(None, (place, problem.path))) or _WHOLE)
                for problem in cause.problems
            )
            continue
        if entry["type"] == "too_short" and len(entry["input"]) >= entry["ctx"]["min_length"]:
            continue  # it is long enough; pydantic did not count items that have errors of their own
        location = _without_tags(entry["loc"])
        if entry["type"] == "invalid_key":  # the location ends in the key itself
            location = location[:-1]
        problems.append(_problem(_dotted_path(location) or _WHOLE, entry, cause))
    return problems


def _without_tags(location: tuple[Any, ...]) -> tuple[Any, ...]:
    """As a user writes it: `model.num_heads`, not `model.translation.num_heads`."""
    return tuple(
        part
        for at, part in enumerate(location)
        if not (location[at - 1] in _TAGGED if at else part in _MODELS)
    )


def _dotted_path(location: tuple[Any, ...]) -> str:
    path = ""
    for part in location:
        name = str(part) or "''"
        path += f"[{part}]" if isinstance(part, int) else f".{name}" if path else name
    return path


def _problem(path: str, entry: Any, cause: Exception | None) -> Problem:
    kind, value, context = entry["type"], entry["input"], entry.get("ctx", {})
    if isinstance(value, dict) and kind != "extra_forbidden":
        value = None  # a whole mapping is too long for a message
    if kind == "extra_forbidden":
        return Problem(
            "unknown_key", path, value, "is not a key that a spec has", "remove it, or look up its spelling"
        )
    if kind == "missing":
        return Problem("missing", path, None, "is required", "add it")
    if kind == "union_tag_not_found":
        tag = str(context["discriminator"]).strip("'")
        return Problem("missing", f"{path}.{tag}", None, "is required", "add it")
    if kind == "invalid_key":
        return Problem(
            "wrong_type", path, value, "must not be a key: only text is", "write it in quotes, or remove it"
        )
    if kind == "string_unicode":
        value = value if isinstance(value, str) else None
        return Problem(
            "invalid_encoding",
            path,
            value,
            "must be text that UTF-8 can hold",
            "remove the lone surrogates in it or its keys",
        )
    if kind == "union_tag_invalid":
        tag = str(context["discriminator"]).strip("'")
        return Problem(
            "not_a_choice",
            f"{path}.{tag}",
            context["tag"],
            f"must be one of {context['expected_tags']}",
            "use one of them",
        )
    if isinstance(cause, RuleError):
        return Problem(cause.code, path, value, cause.rule, cause.remedy)
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        also = " or the word auto" if path == "parallel" else ""
        return Problem(
            "wrong_type", path, value, f"must be a mapping of fields{also}", "write its fields below it"
        )
    if kind == "too_long" and not isinstance(value, str):
        limit = context["max_length"]
        return Problem(
            "too_large", path, None, f"must have at most {limit} entries", _FEWER.get(path, "leave some out")
        )
    message = entry["msg"]
    message = message.replace("Input should be", "must be").replace("should", "must")
    if message[:1].isupper():
        message = "is wrong: " + message
    return Problem(code_of(kind), path, value, message, _REMEDIES.get(kind, _OTHERWISE))


def code_of(kind: str) -> ProblemCode:
    """Code of a pydantic error type."""
    if (code := _CODES.get(kind)) is not None:
        return code
    return "wrong_type" if kind.endswith(("_type", "_parsing", "_from_float")) else "invalid_value"


_CODES: dict[str, ProblemCode] = {
    "date_parsing": "invalid_value",
    "datetime_parsing": "invalid_value",
    "enum": "not_a_choice",
    "extra_forbidden": "unknown_key",
    "finite_number": "not_finite",
    "greater_than": "out_of_range",
    "greater_than_equal": "out_of_range",
    "int_parsing_size": "out_of_range",
    "json_invalid": "invalid_syntax",
    "less_than": "out_of_range",
    "less_than_equal": "out_of_range",
    "literal_error": "not_a_choice",
    "missing": "missing",
    "multiple_of": "not_divisible",
    "string_too_long": "too_large",
    "string_too_short": "empty",
    "string_unicode": "invalid_encoding",
    "too_long": "too_large",
    "too_short": "empty",
    "url_parsing": "invalid_value",
}
_OTHERWISE = "write what the rule asks for"
_FEWER = {
    "data.paths": "name several files by one pattern with `*`, or put them together",
    "data.files": "put the files of a language together",
    "data.sources": "name several files by one source's `paths`",
}
_REMEDIES = {
    "greater_than": "raise it",
    "greater_than_equal": "raise it",
    "less_than": "lower it",
    "less_than_equal": "lower it",
    "int_type": "write a whole number, without quotes",
    "int_from_float": "write a whole number",
    "float_parsing": "write a number",
    "float_type": "write a number",
    "finite_number": "write a finite number",
    "string_type": "put it in quotes",
    "string_pattern_mismatch": "use letters, digits, '.', '_' and '-' only",
    "literal_error": "use one of them",
    "bool_parsing": "write true or false",
    "bool_type": "write true or false",
    "tuple_type": "write it as a list",
    "string_too_short": "write more",
    "string_too_long": "shorten it",
    "too_short": "add what is missing",
    "too_long": "take some away",
}

"""Pydantic's validation errors as problems."""

from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from moe.spec.errors import Problem, ProblemCode, RuleError, SpecError

_TAGGED = {"model", "data", "optimizer", "attention"}
"""Parts with a discriminator: pydantic inserts their tags into locations."""
_MODELS = {"translation", "language", "module"}
"""Tags at the start of a location if a model is parsed alone."""
_ROOT_NAME = "the spec"


def problems_of(error: ValidationError) -> list[Problem]:
    """A Problem, with path, value, rule and remedy, for each of pydantic's errors."""
    problems: list[Problem] = []
    for entry in error.errors(include_url=False):
        cause = entry.get("ctx", {}).get("error")
        if isinstance(cause, SpecError):
            location = entry["loc"][:-1] if entry["loc"][-1:] == ("router",) else entry["loc"]  # written flat
            place = dotted_path(_without_tags(location))
            problems.extend(
                replace(problem, path=".".join(filter(None, (place, problem.path))) or _ROOT_NAME)
                for problem in cause.problems
            )
            continue
        if entry["type"] == "too_short" and len(entry["input"]) >= entry["ctx"]["min_length"]:
            continue  # long enough: pydantic does not count invalid items
        location = _without_tags(entry["loc"])
        if entry["type"] == "invalid_key":  # the location ends in the key itself
            location = location[:-1]
        problems.append(_problem(dotted_path(location) or _ROOT_NAME, entry, cause))
    return problems


def _without_tags(location: tuple[Any, ...]) -> tuple[Any, ...]:
    """Location as the user writes it: `model.num_heads`, not `model.translation.num_heads`."""
    return tuple(
        part
        for index, part in enumerate(location)
        if not (location[index - 1] in _TAGGED if index else part in _MODELS)
    )


def dotted_path(location: tuple[Any, ...]) -> str:
    """A location as `data.files[0].name`."""
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
        return Problem("unknown_key", path, value, "is not a known key", "remove it, or check its spelling")
    if kind == "missing":
        return Problem("missing", path, None, "is required", "add it")
    if kind == "union_tag_not_found":
        tag = str(context["discriminator"]).strip("'")
        return Problem("missing", f"{path}.{tag}", None, "is required", "add it")
    if kind == "invalid_key":
        return Problem("wrong_type", path, value, "must not be a key: keys are text", "quote or remove it")
    if kind == "string_unicode":
        value = value if isinstance(value, str) else None
        return Problem(
            "invalid_encoding", path, value, "must be valid UTF-8", "remove lone surrogates from it and its keys"
        )
    if kind == "union_tag_invalid":
        tag = str(context["discriminator"]).strip("'")
        return Problem("not_a_choice", f"{path}.{tag}", context["tag"], f"must be one of {context['expected_tags']}",
                       "use one of them")  # fmt: skip
    if isinstance(cause, RuleError):
        return Problem(cause.code, path, value, cause.rule, cause.remedy)
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        alternative = " or the word auto" if path == "parallel" else ""
        return Problem(
            "wrong_type", path, value, f"must be a mapping of fields{alternative}", "write its fields below it"
        )
    if kind == "too_long" and not isinstance(value, str):
        limit = context["max_length"]
        return Problem(
            "too_large", path, None, f"must have at most {limit} entries", _TOO_LONG_REMEDIES.get(path, "remove some")
        )
    return Problem(code_of(kind), path, value, rule_of(entry), _REMEDIES.get(kind, _DEFAULT_REMEDY))


def rule_of(entry: Any) -> str:
    """Rule that was broken, phrased to follow the path: `must be a whole number`."""
    kind, context = entry["type"], entry.get("ctx", {})
    if kind in _RULES:
        return _RULES[kind]
    if kind == "too_short":
        minimum = context["min_length"]
        return f"must have at least {minimum} {'entry' if minimum == 1 else 'entries'}"
    message = str(entry["msg"]).removeprefix("Value error, ")
    for subject in ("Input should", "String should", "should"):
        message = message.replace(subject, "must")
    return f"is invalid: {message[0].lower()}{message[1:]}" if message[:1].isupper() else message


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
_RULES = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "finite_number": "must be a finite number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "has too many digits",
    "int_type": "must be a whole number",
    "list_type": "must be a list",
    "string_type": "must be text",
    "tuple_type": "must be a list",
}
_DEFAULT_REMEDY = "correct it"
_TOO_LONG_REMEDIES = {
    "data.paths": "match several files with one `*` pattern, or merge them",
    "data.files": "merge the files of each language",
    "data.sources": "list several files in the `paths` of one source",
}
_REMEDIES = {
    "greater_than": "raise it",
    "greater_than_equal": "raise it",
    "less_than": "lower it",
    "less_than_equal": "lower it",
    "int_type": "write it as digits, without quotes",
    "int_from_float": "remove the fraction",
    "float_parsing": "write it as digits",
    "float_type": "write it as digits, without quotes",
    "finite_number": "use a finite number",
    "string_type": "quote it",
    "string_pattern_mismatch": "use only letters, digits, '.', '_' and '-'",
    "literal_error": "use one of them",
    "bool_parsing": "write true or false",
    "bool_type": "write true or false",
    "tuple_type": "put its entries in a list",
    "string_too_short": "lengthen it",
    "string_too_long": "shorten it",
    "too_short": "add entries",
    "too_long": "shorten it",
}

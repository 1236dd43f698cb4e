"""What pydantic found wrong with a spec, in our own words."""

from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from moe.spec.errors import Problem, SpecError

_TAGS = {
    "catalogs",
    "jsonl",
    "text",
    "synthetic",
    "adamw",
    "adafactor",
    "translation",
    "language",
    "grouped_query",
    "latent",
}
_TAGGED = {"model", "data", "optimizer", "attention"}
"""Parts of a kind, which pydantic puts into the place of what is wrong with them."""


def problems_of(error: ValidationError) -> list[Problem]:
    """Every mistake that pydantic found, each with its place, the value, the rule and the remedy."""
    problems: list[Problem] = []
    for entry in error.errors(include_url=False):
        cause = entry.get("ctx", {}).get("error")
        if isinstance(cause, SpecError):
            place = _dotted(_without_tags(entry["loc"]))
            problems.extend(
                replace(problem, path=".".join(filter(None, (place, problem.path))))
                for problem in cause.problems
            )
            continue
        if entry["type"] == "too_short" and len(entry["input"]) >= entry["ctx"]["min_length"]:
            continue  # it is long enough: only items that have their own error were not counted
        problems.append(_problem(_dotted(_without_tags(entry["loc"])), entry, cause))
    return problems


def _without_tags(location: tuple[Any, ...]) -> tuple[Any, ...]:
    """The place as a user writes it: `model.num_heads`, not `model.translation.num_heads`."""
    before = ("model", *location)
    return tuple(
        part
        for part, above in zip(location, before, strict=False)
        if not (part in _TAGS and above in _TAGGED)
    )


def _dotted(location: tuple[Any, ...]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path


def _problem(path: str, entry: Any, cause: Exception | None) -> Problem:
    kind, value, context = entry["type"], entry["input"], entry.get("ctx", {})
    if isinstance(value, dict) and kind != "extra_forbidden":
        value = None  # a whole part says nothing in a line
    if kind == "extra_forbidden":
        return Problem(path, value, "is not a key that a spec has", "remove it, or look up its spelling")
    if kind == "missing":
        return Problem(path, None, "is required", "add it")
    if kind == "union_tag_not_found":
        tag = str(context["discriminator"]).strip("'")
        return Problem(f"{path}.{tag}", None, "is required", "add it")
    if kind == "union_tag_invalid":
        tag = str(context["discriminator"]).strip("'")
        return Problem(
            f"{path}.{tag}", context["tag"], f"must be one of {context['expected_tags']}", "use one of them"
        )
    if cause is not None:
        rule, _, remedy = str(cause).partition("; ")
        return Problem(path, value, rule, remedy)
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        also = " or the word auto" if path == "parallel" else ""
        return Problem(path, value, f"must be a mapping of fields{also}", "write its fields below it")
    message = entry["msg"]
    message = message.replace("Input should be", "must be").replace("should", "must")
    if message[:1].isupper():
        message = "is wrong: " + message
    return Problem(path, value, message, _REMEDIES.get(kind, ""))


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
}

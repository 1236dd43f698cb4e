"""Label and field selectors."""

import re
from typing import Any

from tests.kubernetes.apiserver.failure import Failure

Object = dict[str, Any]

_SET = re.compile(r"^(\S+)\s+(in|notin)\s+\(([^)]*)\)$")
_EVENT_FIELDS = ("involvedObject.", "reason", "type", "reportingComponent", "source")
_POD_FIELDS = ("spec.nodeName", "status.phase", "spec.restartPolicy")


def matches_labels(value: Object, selector: str) -> bool:
    labels = value["metadata"].get("labels") or {}
    return all(_matches(labels, requirement) for requirement in _split(selector))


def _split(selector: str) -> list[str]:
    return [part.strip() for part in re.split(r",(?![^(]*\))", selector) if part.strip()]


def _matches(labels: dict[str, str], requirement: str) -> bool:
    if match := _SET.match(requirement):
        name, operator, values = match.groups()
        is_in = labels.get(name) in [v.strip() for v in values.split(",")]
        return (is_in and name in labels) if operator == "in" else not (is_in and name in labels)
    if "!=" in requirement:
        name, value = requirement.split("!=", 1)
        return labels.get(name.strip()) != value.strip()
    if "=" in requirement:
        name, value = re.split("==?", requirement, maxsplit=1)
        return labels.get(name.strip()) == value.strip()
    if requirement.startswith("!"):
        return requirement[1:] not in labels
    return requirement in labels


def check_fields(resource: str, selector: str) -> None:
    """Raise Failure (400) for a field that this resource cannot be selected by."""
    extra = {"events": _EVENT_FIELDS, "pods": _POD_FIELDS}.get(resource, ())
    for requirement in _split(selector):
        name = re.split("!?==?", requirement, maxsplit=1)[0]
        if name not in ("metadata.name", "metadata.namespace") and not name.startswith(extra or ("\0",)):
            raise Failure(400, "BadRequest", f"field label not supported: {name}")


def matches_fields(value: Object, selector: str) -> bool:
    for requirement in _split(selector):
        name, operator, expected = re.split("(!?==?)", requirement, maxsplit=1)
        actual: Any = value
        for part in name.split("."):
            actual = actual.get(part, "") if isinstance(actual, dict) else ""
        if (str(actual) == expected) == operator.startswith("!"):
            return False
    return True

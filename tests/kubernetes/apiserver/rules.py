"""CEL rules of custom resource definitions (x-kubernetes-validations), evaluated by cel-python."""

from functools import cache
from typing import Any

Schema = dict[str, Any]


def violated_rules(schema: Schema, value: Any, old: Any) -> list[str]:
    """Messages of the violated rules. Rules on `oldSelf` hold where there was no value."""
    messages = []
    for rule in schema.get("x-kubernetes-validations") or ():
        text = rule["rule"]
        if "oldSelf" in text and old is None:
            continue
        if not _holds(text, value, old):
            kind = {dict: "object", list: "array", str: "string"}.get(type(value), "integer")
            messages.append(f'Invalid value: "{kind}": {rule.get("message") or f"failed rule: {text}"}')
    return messages


def _holds(text: str, value: Any, old: Any) -> bool:
    from celpy import json_to_cel

    variables = {"self": json_to_cel(value)}
    if old is not None:
        variables["oldSelf"] = json_to_cel(old)
    return bool(_program(text).evaluate(variables))


@cache
def _program(text: str) -> Any:
    import celpy  # its grammar takes a third of a second to load

    environment = celpy.Environment()
    return environment.program(environment.compile(text))

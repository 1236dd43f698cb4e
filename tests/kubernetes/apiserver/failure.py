"""Refusals in the words and codes of kube-apiserver."""

from typing import Any

Object = dict[str, Any]


class Failure(Exception):
    """A request that is answered with a Status of failure."""

    def __init__(self, code: int, reason: str, message: str, **details: Any) -> None:
        super().__init__(code, reason, message)
        self.code, self.reason, self.message, self.details = code, reason, message, details

    def status(self) -> Object:
        status: Object = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        status["message"] = self.message
        if self.reason:
            status["reason"] = self.reason
        if self.details:
            status["details"] = self.details
        return {**status, "code": self.code}


def not_found(resource: str, group: str, name: str) -> Failure:
    qualified = f"{resource}.{group}" if group else resource
    return Failure(404, "NotFound", f'{qualified} "{name}" not found', name=name, kind=resource, group=group)


def invalid(kind: str, group: str, name: str, causes: list[tuple[str, str]]) -> Failure:
    """Refusal of fields: `causes` are paths and messages."""
    qualified = f"{kind}.{group}" if group else kind
    lines = [f"{field}: {message}" for field, message in causes]
    text = lines[0] if len(lines) == 1 else f"[{', '.join(lines)}]"
    details = [{"reason": "FieldValueInvalid", "message": message, "field": field} for field, message in causes]
    return Failure(
        422, "Invalid", f'{qualified} "{name}" is invalid: {text}', name=name, group=group, kind=kind, causes=details
    )


def conflict(resource: str, group: str, name: str, message: str) -> Failure:
    qualified = f"{resource}.{group}" if group else resource
    text = f'Operation cannot be fulfilled on {qualified} "{name}": {message}'
    return Failure(409, "Conflict", text, name=name, group=group, kind=resource)


MODIFIED = "the object has been modified; please apply your changes to the latest version and try again"
EXPIRED = "The provided continue parameter is too old to display a consistent list result."


def expired(message: str) -> Failure:
    return Failure(410, "Expired", message)

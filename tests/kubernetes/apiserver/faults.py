"""Faults and denials on demand."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from tests.kubernetes.apiserver.failure import Failure

FaultKind = Literal["status", "drop", "drop_response", "delay", "break_watch", "expire_watch"]


@dataclass
class Fault:
    """What the next matching requests meet.

    `status` answers with `code`; `drop` closes the connection before the request has an effect, `drop_response` after
    it; `delay` answers after `seconds`. `break_watch` closes the connection of watches, open or to come,
    `expire_watch` ends them with 410.
    """

    kind: FaultKind
    verb: str = ""
    resource: str = ""
    """Plural; empty for all, like the verb and the user."""
    user: str = ""
    count: int = 1
    code: int = 500
    reason: str = "InternalError"
    message: str = "Internal error occurred: fault on demand"
    retry_after_s: int | None = None
    seconds: float = 0.0

    def matches(self, *, verb: str, resource: str, user: str) -> bool:
        return (
            self.verb in ("", verb)
            and self.resource in ("", resource.partition("/")[0])
            and self.user in ("", user)
            and self.count > 0
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Denial:
    """A refusal of objects: by a webhook when they are created or changed, by a quota when they are created."""

    resource: str
    message: str
    """Reason of a webhook, or of a quota: `exceeded quota: compute, requested: ..., used: ..., limited: ...`."""
    webhook: str = ""
    """Name of the webhook; empty for a quota."""
    prefix: str = ""
    """Beginning of the names of the objects."""
    code: int = 403

    def check(self, resource: str, group: str, name: str) -> None:
        """Raises Failure if it refuses the object."""
        if resource != self.resource or not name.startswith(self.prefix):
            return
        if self.webhook:
            raise Failure(
                self.code, "Forbidden", f'admission webhook "{self.webhook}" denied the request: {self.message}'
            )
        qualified = f"{resource}.{group}" if group else resource
        message = f'{qualified} "{name}" is forbidden: {self.message}'
        raise Failure(self.code, "Forbidden", message, name=name, group=group, kind=resource)

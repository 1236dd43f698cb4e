"""Errors of requests to a Kubernetes API server, by what a caller does about them."""

import re
from dataclasses import dataclass
from typing import Literal

from service.control.kubernetes.resource import Object

_DENIED = re.compile(r"cannot \w+ resource ")
_UNKNOWN = re.compile(r'unknown field "([^"]+)"')
_UNTYPED = re.compile(r"failed to create typed patch object \(.*?\): (?:errors:)?(?P<fields>.*)", re.DOTALL)
"""Refusal of an apply with unknown fields, which kube-apiserver answers with code 500 (kubernetes issue 118877)."""
_WEBHOOK = re.compile(r'admission webhook "[^"]+" denied the request')

Rule = Literal["schema", "quota", "webhook", "admission"]


class KubernetesError(Exception):
    """A request failed; the base of all errors of this package."""


class Misconfigured(KubernetesError):
    """The client cannot be set up: no package, no credentials, no such context."""


class Unavailable(KubernetesError):
    """The API server did not answer, or asked to come back later, until the time-out. The outcome of a write is
    unknown."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s)
        self.retry_after_s = retry_after_s
        """Delay that the server asked for, if any."""

    def __str__(self) -> str:
        return str(self.args[0])


class Forbidden(KubernetesError):
    """The credentials do not allow this verb on this resource."""

    def __init__(self, message: str, verb: str, resource: str) -> None:
        super().__init__(message, verb, resource)
        self.verb, self.resource = verb, resource

    def __str__(self) -> str:
        return str(self.args[0])


class NotFound(KubernetesError):
    """No such object or namespace."""


class NotServed(NotFound):
    """The API server does not serve this resource: its definition is not installed."""


class Conflict(KubernetesError):
    """Another writer was first: a newer version, an object of that name, or a field of another manager."""

    def __init__(self, message: str, reason: str = "Conflict") -> None:
        super().__init__(message, reason)
        self.reason = reason
        """`Conflict` or `AlreadyExists`, as in the server's Status."""

    def __str__(self) -> str:
        return str(self.args[0])


class Gone(KubernetesError):
    """The server no longer has this version or continue token: list again."""


@dataclass(frozen=True)
class Cause:
    """One refused field."""

    field: str
    message: str


class Invalid(KubernetesError):
    """The object is refused: by its schema, an admission webhook, a quota or another admission check. Only a refusal
    by a quota may pass later without a change."""

    def __init__(self, message: str, rule: Rule, causes: tuple[Cause, ...] = ()) -> None:
        super().__init__(message, rule, causes)
        self.rule, self.causes = rule, causes

    def __str__(self) -> str:
        return str(self.args[0])


def from_status(code: int, status: Object, *, verb: str, resource: str, retry_after_s: float | None) -> KubernetesError:
    """Error of a response with this HTTP code and `Status` object."""
    message = str(status.get("message") or status.get("reason") or f"HTTP {code}")
    details = status.get("details") or {}
    if 300 <= code < 400:
        return Unavailable(f"the API server answered {code}, a redirect, which is not followed; name its own address")
    if code == 401:
        message = f"the API server does not accept the credentials ({message}); renew the token or kubeconfig"
        return Forbidden(message, verb, resource)
    if code == 403:
        if (rule := _rule(message)) is not None:
            return Invalid(message, rule)
        return Forbidden(message, verb, resource)
    if code == 404:
        if not details.get("name"):
            text = f"the API server does not serve {resource} ({message.strip()}); install its definitions (CRDs)"
            return NotServed(text)
        return NotFound(message)
    if code == 409:
        return Conflict(message, str(status.get("reason") or "Conflict"))
    if code == 410:
        return Gone(message)
    if code == 500 and (match := _UNTYPED.search(message)) is not None:
        lines = [line.strip().partition(": ") for line in match["fields"].splitlines() if line.strip()]
        return Invalid(message, "schema", tuple(Cause(field.lstrip("."), rule) for field, _, rule in lines))
    if code == 429 or code >= 500:
        return Unavailable(f"the API server answered {code}: {message}", retry_after_s)
    causes = tuple(Cause(c.get("field", ""), c.get("message", "")) for c in details.get("causes") or ())
    causes = causes or tuple(Cause(field, "unknown field") for field in _UNKNOWN.findall(message))
    return Invalid(message, _rule(message) or "schema", causes)


def _rule(message: str) -> Rule | None:
    """Admission check that a refusal comes from; None for a refusal by RBAC or a schema."""
    if _WEBHOOK.search(message):
        return "webhook"
    if "exceeded quota" in message or "failed quota" in message:
        return "quota"
    if "is forbidden: " in message and not _DENIED.search(message):
        return "admission"
    return None

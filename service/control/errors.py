"""Errors of the service: each becomes an `application/problem+json` response (RFC 9457)."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from moe.spec.errors import Problem


class ServiceError(Exception):
    """An error response; subclasses define its status and kind."""

    status: ClassVar[int]
    kind: ClassVar[str]
    """Stable, for programs; the detail is for people."""

    def __init__(
        self,
        detail: str,
        problems: Problem | Iterable[Problem] = (),
        *,
        headers: Mapping[str, str] | None = None,
        members: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        self.headers = dict(headers or {})
        self.members = dict(members or {})


class MalformedRequest(ServiceError):
    """The request cannot be read."""

    status, kind = 400, "malformed-request"


class AuthenticationError(ServiceError):
    """The token is missing or wrong."""

    status, kind = 401, "unauthenticated"


class Forbidden(ServiceError):
    """Not allowed for anyone: from another origin's page, or of a run that was replaced by another."""

    status, kind = 403, "forbidden"


class NotFound(ServiceError):
    """There is no such thing."""

    status, kind = 404, "not-found"


class Conflict(ServiceError):
    """The request conflicts with the current state."""

    status, kind = 409, "conflict"


class Gone(ServiceError):
    """It existed, and was removed."""

    status, kind = 410, "gone"


class BodyTooLarge(ServiceError):
    """The body exceeds the limit."""

    status, kind = 413, "too-large"


class UnsupportedMediaType(ServiceError):
    """The body is of an unsupported type, or of one that web pages can send without preflight."""

    status, kind = 415, "unsupported-media-type"


class OutOfRange(ServiceError):
    """The requested range begins at or after the end."""

    status, kind = 416, "range-not-satisfiable"


class MisdirectedRequest(ServiceError):
    """The request was meant for another host."""

    status, kind = 421, "misdirected-request"


class Invalid(ServiceError):
    """The request is well-formed, but its values are not valid."""

    status, kind = 422, "invalid"


class TooManyRequests(ServiceError):
    """Too many attempts with a wrong token."""

    status, kind = 429, "too-many-requests"


class Unavailable(ServiceError):
    """Something that this service needs does not respond."""

    status, kind = 503, "unavailable"


class Full(ServiceError):
    """The disk is full: nothing can be stored, but everything stored can be read."""

    status, kind = 507, "storage-full"

"""Refusals of the service, in words: each becomes an `application/problem+json` answer (RFC 9457)."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from moe.spec.errors import Problem


class ServiceError(Exception):
    """A refusal; its subclasses say which status it has and what kind it is."""

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
    """A token is needed, and the right one."""

    status, kind = 401, "unauthenticated"


class Forbidden(ServiceError):
    """Not allowed, whoever asks: from another origin's page, or of a run that another has taken the place of."""

    status, kind = 403, "forbidden"


class NotFound(ServiceError):
    """There is no such thing."""

    status, kind = 404, "not-found"


class Conflict(ServiceError):
    """The request does not go with what is so now."""

    status, kind = 409, "conflict"


class Gone(ServiceError):
    """It was there, and was taken away."""

    status, kind = 410, "gone"


class BodyTooLarge(ServiceError):
    """The body is longer than what is read."""

    status, kind = 413, "too-large"


class UnsupportedMediaType(ServiceError):
    """The body is of a type that is not read, or that a web page could send unasked."""

    status, kind = 415, "unsupported-media-type"


class OutOfRange(ServiceError):
    """A part was asked for that begins at or after the end."""

    status, kind = 416, "range-not-satisfiable"


class MisdirectedRequest(ServiceError):
    """The request was meant for another host."""

    status, kind = 421, "misdirected-request"


class Invalid(ServiceError):
    """The request can be read, and asks for what cannot be."""

    status, kind = 422, "invalid"


class Unavailable(ServiceError):
    """Something that this service needs does not answer."""

    status, kind = 503, "unavailable"


class Full(ServiceError):
    """A disk is full: nothing new is taken in, and all that is there can be read."""

    status, kind = 507, "storage-full"

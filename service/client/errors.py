"""Client errors, with messages that users can act on."""

from typing import TYPE_CHECKING, Any, cast

from moe.deprecation import warn_renamed

if TYPE_CHECKING:
    from moe.spec.errors import Problem


class ClientError(Exception):
    """A client operation failed."""


class BadUrl(ClientError):
    """A value that is not the URL of a control plane."""


class BadToken(ClientError):
    """The token is not valid in a request header."""


class Unreachable(ClientError):
    """No control plane answers at the URL."""

    def __init__(self, url: str, cause: str = "", is_refused: bool = False) -> None:
        self.url, self.cause, self.is_refused = url, cause, is_refused
        """`is_refused`: no connection was established, so that the request was not sent."""
        super().__init__(url, cause, is_refused)

    @property
    def why(self) -> str:
        """Deprecated name of `cause`."""
        warn_renamed("Unreachable.why", "Unreachable.cause")
        return self.cause

    def __str__(self) -> str:
        because = f" ({self.cause})" if self.cause else ""
        return f"cannot reach {self.url}{because}: is 'shardyard up' running?"


class NotShardyard(ClientError):
    """The server at the URL does not speak Shardyard's API."""

    def __init__(self, url: str, status: int, content_type: str) -> None:
        self.url, self.status, self.content_type = url, status, content_type
        super().__init__(url, status, content_type)

    def __str__(self) -> str:
        answer_text = f"status {self.status} and {self.content_type or 'no content type'}"
        return f"{self.url} responded with {answer_text}, unlike a Shardyard control plane; check the URL"


class ApiError(ClientError):
    """An error response: status, title, detail and `Problem`s."""

    def __init__(self, status: int, title: str, detail: str = "", problems: "tuple[Problem, ...]" = ()) -> None:
        self.status, self.title, self.detail, self.problems = status, title, detail, problems
        super().__init__(status, title, detail, problems)

    @classmethod
    def from_problem(cls, status: int, body: dict[str, Any]) -> "ApiError":
        """Error from an `application/problem+json` body (RFC 9457), parsed leniently."""
        errors = body.get("errors")
        problems = _problems(errors) if isinstance(errors, list) and errors else ()
        return cls(status, str(body.get("title") or f"status {status}"), str(body.get("detail") or ""), problems)

    def __str__(self) -> str:
        if self.problems:
            return "\n".join(str(problem) for problem in self.problems)
        return self.detail or self.title


def _problems(errors: list[Any]) -> "tuple[Problem, ...]":
    from moe.spec.errors import Problem, ProblemCode

    return tuple(
        Problem(
            cast(ProblemCode, str(error.get("code", ""))),  # later releases may have other codes
            str(error.get("path", "")),
            error.get("value"),
            str(error.get("rule", "")),
            str(error.get("remedy", "")),
        )
        for error in errors
        if isinstance(error, dict)
    )

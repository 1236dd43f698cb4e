"""The base of every spec: frozen, and closed to unknown keys at any depth."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class Spec(BaseModel):
    """An immutable part of what a user asks for."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=False,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


_MOST = 2**53 - 1
"""The largest that every reader of JSON takes as it is, and that databases hold."""


def _exact(number: int) -> int:
    if number > _MOST:
        raise ValueError(f"must be at most {_MOST}; lower it")
    return number


Count = Annotated[int, Field(strict=True, gt=0), AfterValidator(_exact)]
"""A number of things of which there is at least one; `true` and `"3"` are not numbers here."""

CountOrZero = Annotated[int, Field(strict=True, ge=0), AfterValidator(_exact)]
Positive = Annotated[float, Field(strict=True, gt=0)]
NonNegative = Annotated[float, Field(strict=True, ge=0)]
Fraction = Annotated[float, Field(strict=True, ge=0, lt=1)]

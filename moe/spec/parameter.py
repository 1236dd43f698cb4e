"""The table of a model's parameters: what each spec says of its own is all that says it."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

Dim = Literal["model", "heads", "hidden", "vocab", "expert", "expert_hidden", "expert_output", "none"]
"""Logical dimension: the width of a token; attention heads side by side; hidden units of a feed-forward layer; entries
of a vocabulary; experts, hidden units of one, and the outputs that its last bias is added to; or one that no layout
splits."""

Size = tuple[Dim, int]
"""A dimension and how long it is."""

Slices = tuple[tuple[int, int], ...]
"""(first, end) of each dimension of a part."""

Form = Literal["full", "bfloat16", "int8", "nf4"]
"""Form that values are kept in: `full` is float32, or float64 where the arithmetic is."""


@dataclass(frozen=True)
class Parameter:
    """One parameter: its path, its shape, what its dimensions count, and how its values begin."""

    name: str
    """Path in the module that it belongs to."""
    shape: tuple[int, ...]
    dims: tuple[Dim, ...]
    std: float | None = None
    """Standard deviation of its initial values, Uniform(±√3·std). None begins with ones."""
    log_of: tuple[float, float] | None = None
    """Where it begins with logarithms of draws from a uniform distribution, that one's ends."""
    frozen: bool = False
    """Whether it keeps the values that it begins with, as what lies beneath adapters does."""
    form: Form = "full"
    """Of a frozen matrix, how its values are kept (`moe.spec.form`)."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def times(self, dim: Dim, number: int) -> "Parameter":
        """So many of it, one after another in a dimension of their own, the first."""
        return replace(self, shape=(number, *self.shape), dims=(dim, *self.dims))

    @property
    def of_experts(self) -> bool:
        """Whether its first dimension counts experts."""
        return self.dims[0] == "expert"


def matrix(name: str, rows: Size, columns: Size, inputs: int) -> Parameter:
    """`[rows, columns]`, of standard deviation `inputs`^-½."""
    return Parameter(name, (rows[1], columns[1]), (rows[0], columns[0]), inputs**-0.5)


def linear(name: str, outputs: Size, inputs: Size) -> Parameter:
    """The matrix `[outputs, inputs]` of a linear map."""
    return matrix(f"{name}.weight", outputs, inputs, inputs[1])


def bias(name: str, outputs: Size) -> Parameter:
    """Bias of a linear map, zeros at first."""
    return Parameter(f"{name}.bias", (outputs[1],), (outputs[0],), 0.0)


def norm(name: str, width: int, dim: Dim = "none", *, one_plus: bool = False) -> Parameter:
    """The scale of a norm: ones at first, or zeros where it scales by `one_plus` it."""
    return Parameter(f"{name}.weight", (width,), (dim,), 0.0 if one_plus else None)


def within(path: str, parameters: Iterable[Parameter]) -> tuple[Parameter, ...]:
    """The same in a module that has theirs at `path`; where that is empty, it is theirs."""
    return tuple(
        replace(parameter, name=f"{path}.{parameter.name}" if path else parameter.name)
        for parameter in parameters
    )

"""Table of a model's parameters, declared by each spec in one place."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

Dim = Literal["model", "heads", "hidden", "vocab", "expert", "expert_hidden", "expert_output", "none"]
"""Logical dimension: token width; attention heads concatenated; hidden units of a feed-forward layer; vocabulary
entries; experts; hidden units of one expert; outputs that its last bias is added to; or one that no layout splits."""

Size = tuple[Dim, int]
"""(dimension, length)."""

Slices = tuple[tuple[int, int], ...]
"""(start, end) of each dimension of a shard."""

Form = Literal["full", "bfloat16", "int8", "nf4"]
"""Storage form of values: `full` is float32, or float64 if the compute dtype is."""


@dataclass(frozen=True)
class Parameter:
    """One parameter: name, shape, logical dimensions and initial distribution."""

    name: str
    """Path in its module."""
    shape: tuple[int, ...]
    dims: tuple[Dim, ...]
    std: float | None = None
    """Standard deviation of the initial values, Uniform(±√3·std). None initializes with ones."""
    log_of: tuple[float, float] | None = None
    """Bounds of a uniform distribution whose logarithms are the initial values, if set."""
    frozen: bool = False
    """Whether it keeps its initial values, as the base of an adapter does."""
    form: Form = "full"
    """Storage form of a frozen matrix (`moe.spec.form`)."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def times(self, dim: Dim, number: int) -> "Parameter":
        """Return the parameter stacked `number` times along a new first dimension."""
        return replace(self, shape=(number, *self.shape), dims=(dim, *self.dims))

    @property
    def of_experts(self) -> bool:
        """Whether its first dimension is the expert dimension."""
        return self.dims[0] == "expert"


def matrix(name: str, rows: Size, columns: Size, inputs: int) -> Parameter:
    """Matrix `[rows, columns]` with initial standard deviation `inputs`^-½."""
    return Parameter(name, (rows[1], columns[1]), (rows[0], columns[0]), inputs**-0.5)


def linear(name: str, outputs: Size, inputs: Size) -> Parameter:
    """Weight `[outputs, inputs]` of a linear layer."""
    return matrix(f"{name}.weight", outputs, inputs, inputs[1])


def bias(name: str, outputs: Size) -> Parameter:
    """Bias of a linear layer, initialized with zeros."""
    return Parameter(f"{name}.bias", (outputs[1],), (outputs[0],), 0.0)


def norm(name: str, width: int, dim: Dim = "none", *, one_plus: bool = False) -> Parameter:
    """Scale of a norm, initialized with ones; with zeros if `one_plus`, where the norm scales by 1 + weight."""
    return Parameter(f"{name}.weight", (width,), (dim,), 0.0 if one_plus else None)


def within(path: str, parameters: Iterable[Parameter]) -> tuple[Parameter, ...]:
    """Return the parameters with `path` prefixed to their names; unchanged if it is empty."""
    return tuple(
        replace(parameter, name=f"{path}.{parameter.name}" if path else parameter.name)
        for parameter in parameters
    )

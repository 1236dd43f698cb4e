"""Table of a model's parameters, declared by each spec."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

Dim = Literal["model", "heads", "hidden", "vocab", "expert", "expert_hidden", "expert_output", "none"]
"""Logical dimension: model dimension, attention heads, hidden units, vocabulary; experts, hidden units of an expert,
outputs that an expert's last bias is added to; or `none`, which no layout splits."""

Size = tuple[Dim, int]
"""(dimension, length)."""

Slices = tuple[tuple[int, int], ...]
"""(start, end) of each dimension of a shard."""

Form = Literal["full", "bfloat16", "int8", "nf4"]
"""Storage form: `full` is float32, or float64 if that is the compute dtype."""


@dataclass(frozen=True)
class Derivation:
    """Initial values taken from another parameter of the same module, or of the table's module."""

    source: "Parameter"
    rows: tuple[int, ...] | None = None
    """Rows of the source in this order; None: the L2 norms of all its rows."""


@dataclass(frozen=True)
class Parameter:
    """Name, shape, logical dimensions and initial values of a parameter."""

    name: str
    shape: tuple[int, ...]
    dims: tuple[Dim, ...]
    std: float | None = None
    """Standard deviation of initial values, Uniform(±√3·std); None for ones."""
    log_of: tuple[float, float] | None = None
    """Initial values are logarithms of uniform draws between these bounds, if set."""
    frozen: bool = False
    """Whether it keeps its initial values."""
    form: Form = "full"
    """Storage form of a frozen matrix (`moe.spec.form`)."""
    derivation: Derivation | None = None
    """Source of initial values, if they are those of another parameter."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def times(self, dim: Dim, number: int) -> "Parameter":
        """Stack it `number` times along a new first dimension."""
        return replace(self, shape=(number, *self.shape), dims=(dim, *self.dims))

    @property
    def of_experts(self) -> bool:
        """Whether its first dimension is the expert dimension."""
        return self.dims[0] == "expert"

    @property
    def is_hidden_matrix(self) -> bool:
        """Whether it maps hidden states to hidden states: a matrix, or one per expert, that is no embedding, output
        projection, router or convolution."""
        if len(self.shape) - self.of_experts < 2 or min(self.shape[-2:]) == 1 or "vocab" in self.dims:
            return False
        kind = self.name.rpartition(".")[2]
        return not kind.startswith("router") and "convolution" not in self.name


def matrix(name: str, rows: Size, columns: Size, inputs: int) -> Parameter:
    """`[rows, columns]` with initial standard deviation `inputs`^-½."""
    return Parameter(name, (rows[1], columns[1]), (rows[0], columns[0]), inputs**-0.5)


def linear(name: str, outputs: Size, inputs: Size) -> Parameter:
    """Weight `[outputs, inputs]` of a linear layer."""
    return matrix(f"{name}.weight", outputs, inputs, inputs[1])


def bias(name: str, outputs: Size) -> Parameter:
    """Bias of a linear layer, initially zeros."""
    return Parameter(f"{name}.bias", (outputs[1],), (outputs[0],), 0.0)


def norm(name: str, width: int, dim: Dim = "none", *, one_plus: bool = False) -> Parameter:
    """Scale of a norm, initially ones; zeros with `one_plus`, where the norm scales by 1 + weight."""
    return Parameter(f"{name}.weight", (width,), (dim,), 0.0 if one_plus else None)


def layer_norm(name: str, width: int) -> tuple[Parameter, Parameter]:
    """Scale of a layer norm, initially ones, and its bias, initially zeros."""
    return norm(name, width), bias(name, ("none", width))


def frozen(parameters: Iterable[Parameter]) -> tuple[Parameter, ...]:
    """The same parameters, not trained."""
    return tuple(replace(parameter, frozen=True) for parameter in parameters)


def with_prefix(path: str, parameters: Iterable[Parameter]) -> tuple[Parameter, ...]:
    """Prefix names with `path`, unless it is empty."""
    return tuple(
        replace(parameter, name=f"{path}.{parameter.name}" if path else parameter.name) for parameter in parameters
    )

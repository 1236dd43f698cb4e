"""A model family in the Hugging Face format: what its config says, and what its tensors are called.

A family's file has one table for each. What is common to many is made of the parts here and in `fields`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from string import Template
from typing import Any

from moe.interchange.pieces import ParameterPiece, piece
from moe.interchange.reading import Reading
from moe.spec import LanguageModelSpec

LAYER = "layers.{layer}."
"""Before our names of what lies in a layer; theirs have `model.` before it. What a layer with linear attention has in
`attention` stands in `linear_attention` in the tables."""

Fields = dict[str, Any]
"""Fields of our spec, by dotted path."""


class Field(ABC):
    """Keys of their config, and the fields of our spec that say the same."""

    @property
    @abstractmethod
    def keys(self) -> tuple[str, ...]:
        """Keys of their config."""

    def read(self, config: Reading) -> Fields:
        """Fields of ours from a config."""
        return {}

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        """Keys for a spec. What they cannot express is found by reading them back."""
        return {}

    def older(self, spec: LanguageModelSpec, config: Mapping[str, Any]) -> dict[str, Any]:
        """Keys that transformers 4 and vLLM need beside those of a `config` that says what the spec does."""
        return {}


@dataclass(frozen=True)
class TensorRow:
    """Row of a tensor table: one of our parameters, or part of it, and where it lies in theirs. The patterns are those
    of `pieces`; without patterns both are the same."""

    our_name: str
    their_name: str
    our_axes: str | None = None
    their_axes: str | None = None

    def piece(self, shape: tuple[int, ...], layer: int | None, sizes: Mapping[str, int]) -> ParameterPiece:
        """Pieces of a parameter of that shape in that layer; `sizes` are those that patterns name."""
        our_pattern, their_pattern = self.patterns(len(shape), sizes)
        return piece(shape, our_pattern, self.name_in(layer), their_pattern, sizes)

    def patterns(self, num_dims: int, sizes: Mapping[str, int]) -> tuple[str, str]:
        """(ours, theirs) of a parameter of so many dimensions, with the sizes that they name."""
        axes = " ".join(f"a{dim}" for dim in range(num_dims))
        our_pattern, their_pattern = (
            Template(pattern or axes).substitute(sizes) for pattern in (self.our_axes, self.their_axes)
        )
        return our_pattern, their_pattern

    def name_in(self, layer: int | None) -> str:
        """Theirs in that layer."""
        return self.their_name if layer is None else self.their_name.replace("{layer}", str(layer))


def transposed_row(our_name: str, their_name: str) -> TensorRow:
    """A matrix, transposed."""
    return TensorRow(our_name, their_name, "a b", "b a")


def part(our_name: str, our_axes: str, their_name: str, their_axes: str) -> TensorRow:
    """Pieces by two patterns; `$name` in them is one of `sizes_of`."""
    return TensorRow(our_name, their_name, our_axes, their_axes)


def sizes_of(spec: LanguageModelSpec) -> dict[str, int]:
    """Lengths that shapes alone do not determine: those of linear attention, by their names in patterns."""
    linear = spec.linear_attention
    if linear is None:
        return {}
    heads, keys, values = linear.num_key_heads, linear.key_dim, linear.values_per_key * linear.value_dim
    return {
        "j": heads, "q": keys, "k": keys, "v": values, "qk": 2 * keys, "head": 2 * keys + values,
        "queries": heads * keys, "keys": 2 * heads * keys, "rows": heads * (2 * keys + values),
    }  # fmt: skip


def in_layers(*rows: TensorRow | Iterable[TensorRow]) -> tuple[TensorRow, ...]:
    """Rows of what lies in every layer."""
    flat = [line for row in rows for line in ([row] if isinstance(row, TensorRow) else row)]
    return tuple(
        TensorRow(LAYER + row.our_name, f"model.{LAYER}{row.their_name}", row.our_axes, row.their_axes) for row in flat
    )


@dataclass(frozen=True)
class Family:
    """One family, both ways."""

    model_types: tuple[str, ...]
    """`model_type` values; the first is written."""
    architecture: str
    defaults: Mapping[str, Any]
    """Values of missing keys. A missing key that is not here is an error."""
    fields: tuple[Field, ...]
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys that must have these values: others change what the model computes in ways that are not supported."""
    unused_keys: Mapping[str, str] = field(default_factory=dict)
    """Keys that change nothing here, beside those that change nothing anywhere, each with the reason."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of keys."""
    tensors: tuple[TensorRow, ...] = ()
    """Layout on the hub, which is also the one that is written."""
    fused_tensors: tuple[TensorRow, ...] = ()
    """Another layout that is read: transformers writes that of its memory when asked to."""
    extra_head_pattern: str | None = None
    """Pattern of names of tensors that are carried through without being trained (multi-token prediction)."""
    new_config_keys: Mapping[str, Any] = field(default_factory=dict)
    """Keys of a new config, beside those of the fields."""
    constant_keys: Mapping[str, Any] = field(default_factory=dict)
    """Keys with one value in every model of the family, which vLLM misinterprets if they are missing."""

    def rows(self, name: str) -> list[list[TensorRow]]:
        """Rows of a parameter, by its name in the tables, in each layout."""
        by_table = ([row for row in table if row.our_name == name] for table in (self.tensors, self.fused_tensors))
        return [rows for rows in by_table if rows]

"""A model family in the Hugging Face format: its config keys and tensor names.

Each family's file has one table for each, built from shared parts here and in `fields`. "Ours" is this library's spec
and parameters, "theirs" the Hugging Face config and tensors.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from string import Template
from typing import Any

from moe.interchange.pieces import ParameterPiece, piece
from moe.interchange.reading import Reading
from moe.interchange.wrapper import Wrapper
from moe.spec import LanguageModelSpec
from moe.spec.language import GatedDeltaNetSpec, GroupedQueryAttentionSpec, Mamba2Spec, ShortConvolutionSpec

LAYER = "layers.{layer}."
"""Prefix of our names in a layer; Hugging Face names also have `model.` before it. In the tables, `attention` of a
layer with linear attention is called `linear_attention`."""

Fields = dict[str, Any]
"""Fields of our spec, by dotted path."""


class Field(ABC):
    """Config keys, and the equivalent fields of our spec."""

    @property
    @abstractmethod
    def keys(self) -> tuple[str, ...]:
        """Config keys."""

    def keys_of(self, spec_path: str) -> tuple[str, ...]:
        """Config keys that a field of our spec, by its dotted path, is read from."""
        return self.keys

    def read(self, config: Reading) -> Fields:
        """Spec fields from a config."""
        return {}

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        """Config keys for a spec. Reading them back shows what they cannot express."""
        return {}

    def older(self, spec: LanguageModelSpec, config: Mapping[str, Any]) -> dict[str, Any]:
        """Keys that transformers 4 and vLLM need in addition to those of `config`, which describes the spec."""
        return {}


@dataclass(frozen=True)
class TensorRow:
    """Row of a tensor table: one of our parameters, or part of it, and its location in a Hugging Face tensor. Patterns
    are those of `pieces`; without patterns, both tensors are equal."""

    parameter_name: str
    tensor_name: str
    parameter_axes: str | None = None
    tensor_axes: str | None = None

    def piece(self, shape: tuple[int, ...], layer: int | None, sizes: Mapping[str, int]) -> ParameterPiece:
        """Piece of a parameter of this shape in this layer. `sizes`: lengths that patterns name."""
        parameter_pattern, tensor_pattern = self.patterns(len(shape), sizes)
        return piece(shape, parameter_pattern, self.name_in(layer), tensor_pattern, sizes)

    def patterns(self, num_dims: int, sizes: Mapping[str, int]) -> tuple[str, str]:
        """(pattern of the parameter, pattern of the tensor) with sizes substituted, for `num_dims` dimensions."""
        axes = " ".join(f"a{dim}" for dim in range(num_dims))
        parameter_pattern, tensor_pattern = (
            Template(pattern or axes).substitute(sizes) for pattern in (self.parameter_axes, self.tensor_axes)
        )
        return parameter_pattern, tensor_pattern

    def name_in(self, layer: int | None) -> str:
        """Hugging Face name in this layer."""
        return self.tensor_name if layer is None else self.tensor_name.replace("{layer}", str(layer))


def transposed_row(parameter_name: str, tensor_name: str) -> TensorRow:
    """Row of a matrix that is transposed."""
    return TensorRow(parameter_name, tensor_name, "a b", "b a")


def part(parameter_name: str, parameter_axes: str, tensor_name: str, tensor_axes: str) -> TensorRow:
    """Row with two patterns, in which `$name` is one of `sizes_of`."""
    return TensorRow(parameter_name, tensor_name, parameter_axes, tensor_axes)


def sizes_of(spec: LanguageModelSpec) -> dict[str, int]:
    """Lengths that shapes do not determine, by their names in patterns: those of linear attention, and of queries, keys
    and values in one tensor."""
    sizes = {}
    if isinstance(spec.attention, GroupedQueryAttentionSpec):
        queries, keys = (
            heads * spec.attention.head_dim for heads in (spec.attention.num_heads, spec.attention.num_kv_heads)
        )
        sizes = {"key_row": queries, "value_row": queries + keys, "packed_rows": queries + 2 * keys}
    linear = spec.linear_attention
    if isinstance(linear, GatedDeltaNetSpec):
        heads, keys, values = linear.num_key_heads, linear.key_dim, linear.values_per_key * linear.value_dim
        sizes |= {
            "j": heads, "q": keys, "k": keys, "v": values, "qk": 2 * keys, "head": 2 * keys + values,
            "queries": heads * keys, "keys": 2 * heads * keys, "rows": heads * (2 * keys + values),
        }  # fmt: skip
    if isinstance(linear, Mamba2Spec):
        sizes |= _sizes_of_mamba2(linear)
    if isinstance(linear, ShortConvolutionSpec):
        sizes["parts"] = 3
    return sizes


def _sizes_of_mamba2(linear: Mamba2Spec) -> dict[str, int]:
    """Lengths of a group's gates z, inputs x, B, C and time steps t, as `z_rows`; where they begin in a group, and in
    tensors that have those of all groups in a row, as `z_begin` and `all_z`; the same without gates and time steps, in
    the convolution; and the lengths of groups and tensors."""
    groups, inner, begin = linear.num_groups, linear.group_widths[0], 0
    sizes = {"group": groups}
    for name, width in zip("zxbct", linear.group_widths, strict=True):
        sizes |= {f"{name}_rows": width, f"{name}_begin": begin, f"all_{name}": groups * begin}
        sizes |= {f"conv_{name}_begin": begin - inner, f"conv_all_{name}": groups * (begin - inner)}
        begin += width
    channels = begin - inner - linear.heads_per_group
    return {**sizes, "width": begin, "all_rows": groups * begin, "channels": channels,
            "all_channels": groups * channels}  # fmt: skip


def in_layers(*rows: TensorRow | Iterable[TensorRow]) -> tuple[TensorRow, ...]:
    """Rows with the prefix of a layer, for every layer."""
    flat = [line for row in rows for line in ([row] if isinstance(row, TensorRow) else row)]
    return tuple(
        TensorRow(LAYER + row.parameter_name, f"model.{LAYER}{row.tensor_name}", row.parameter_axes, row.tensor_axes)
        for row in flat
    )


@dataclass(frozen=True)
class Family:
    """Model family, for reading and writing."""

    model_types: tuple[str, ...]
    """`model_type` values; the first is written."""
    architecture: str
    defaults: Mapping[str, Any]
    """Values of missing keys. A missing key without a default is an error."""
    fields: tuple[Field, ...]
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys that must have these values; other values change the computation in unsupported ways."""
    unused_keys: Mapping[str, str] = field(default_factory=dict)
    """Ignored keys, in addition to those that every family ignores, each with the reason."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Key by alternative name."""
    tensors: tuple[TensorRow, ...] = ()
    """Layout on the hub, also used for writing."""
    fused_tensors: tuple[TensorRow, ...] = ()
    """Alternative layout for reading: the layout in memory, which transformers can also write."""
    read_tensors: tuple[TensorRow, ...] = ()
    """Further layout for reading."""
    mtp_pattern: str | None = None
    """Name pattern of tensors that are copied but not trained (multi-token prediction, MTP)."""
    new_config_keys: Mapping[str, Any] = field(default_factory=dict)
    """Keys of a new config, in addition to those of the fields."""
    activation: tuple[str, str] = ("hidden_act", "silu")
    """Key and value of the activation of all feed-forward layers and experts."""
    constant_keys: Mapping[str, Any] = field(default_factory=dict)
    """Keys with one value in every model of the family, which vLLM misinterprets if they are missing."""
    wrapper: Wrapper | None = None
    """Multimodal model that contains the language model."""
    text_family: "Family | None" = None
    """Family of the language model alone, in a wrapper."""
    swaps_expert_factors: bool = False
    """Whether PEFT takes the inputs of fused experts for their outputs, and so A of an adapter for B."""
    is_in_transformers: bool = True
    """Whether transformers has a class of the model, whose modules adapters are named after."""

    def key_path(self, config: Mapping[str, Any], key: str) -> str:
        """Path in a config of a key of the language model."""
        return key if self.wrapper is None else self.wrapper.path(config, key)

    def text_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Config of the language model in a config of the family."""
        return dict(config) if self.wrapper is None else self.wrapper.text_config(config)

    def rows(self, name: str) -> list[list[TensorRow]]:
        """Rows of a parameter in each layout, by its name in the tables: the hub's first, that in memory last."""
        tables = (self.tensors, self.read_tensors, self.fused_tensors)
        by_table = ([row for row in table if row.parameter_name == name] for table in tables)
        return [rows for rows, _ in groupby(filter(None, by_table))]

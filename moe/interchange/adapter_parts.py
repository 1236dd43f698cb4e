"""Matrices A and B of a model's adapters, and their names in PEFT's format, which follow PEFT's wrappers around the
modules of the transformers model. No torch.

There, experts are two fused parameters. A is `[E · r, in]`, expert by expert; B is `[out, r · E]`, with the rank as the
outer index of the columns.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from moe.interchange.family import Family, TensorRow, sizes_of
from moe.interchange.fitting import expected_tensors, rows_of
from moe.interchange.pieces import ParameterPiece, dimensions, piece
from moe.spec import LanguageModelSpec, Problem, SpecError
from moe.spec.adapter import A, B
from moe.spec.parameter import Parameter

PREFIX = "base_model.model."
FIRST, SECOND = ("gate_up_proj", "up_proj"), "down_proj"
"""Names of the fused parameters, of which the first is `up_proj` without a gate."""


@dataclass(frozen=True)
class AdapterPlace:
    """Location of an adapted matrix in the transformers model."""

    module: str
    """Path of the module that PEFT wraps."""
    path_in_layer: str
    """The module's path within its layer."""
    parameter: str | None
    """Parameter's name within the module if PEFT wraps the parameter, else None. PEFT wraps the parameters of fused
    experts and routers and, in models with experts, those of other feed-forward layers: it takes modules called
    `gate_proj` there for experts to fuse."""

    @classmethod
    def from_row(cls, row: TensorRow, layer: int | None, *, is_module: bool) -> "AdapterPlace":
        """Location of a Hugging Face tensor; `is_module`: whether PEFT wraps the whole module."""
        module, _, last = row.name_in(layer).rpartition(".")
        path_in_layer = row.tensor_name.rpartition("{layer}.")[2].rpartition(".")[0]
        return cls(module, path_in_layer, None if is_module else last)

    @property
    def target(self) -> str:
        """Target's name in PEFT's config."""
        return self.module if self.parameter is None else f"{self.module}.{self.parameter}"

    @property
    def target_in_layer(self) -> str:
        """`target` without the layer."""
        return self.path_in_layer if self.parameter is None else f"{self.path_in_layer}.{self.parameter}"


@dataclass(frozen=True)
class Half:
    """Matrix A or B of an adapter."""

    parameter_name: str
    shape: tuple[int, ...]
    pieces: tuple[ParameterPiece, ...]
    """Parts of one PEFT tensor: several if its rows are in another order than ours."""
    place: AdapterPlace

    @property
    def tensor_name(self) -> str:
        return self.pieces[0].name

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        return self.pieces[0].tensor_side.shape


def halves(spec: LanguageModelSpec, family: Family) -> list[Half]:
    """A and B of each adapter of a model. Raises SpecError for a matrix that PEFT's format cannot express."""
    assert spec.adapter is not None
    table = {parameter.name: parameter for parameter in spec.parameters()}
    matrices = [parameter for name, parameter in table.items() if name + B in table]
    adapter_halves, problems = [], []
    for matrix in matrices:
        layer, rows = memory_rows(spec, family, matrix.name)
        if not rows:
            problems.append(_inexpressible(matrix.name, family))
            continue
        sizes = {**sizes_of(spec), "rank": spec.adapter.rank_of(matrix.name)}
        place = AdapterPlace.from_row(rows[0], layer, is_module=spec.moe is None or ".attention." in matrix.name)
        by_row = [_patterns(matrix, row.patterns(len(matrix.shape), sizes)) for row in rows]
        for half in by_row[0]:
            if matrix.name + half not in table:
                continue
            shape = table[matrix.name + half].shape
            wrapper_path = ".base_layer" if place.parameter in FIRST and _wraps_both(matrix, table) else ""
            tensor_name = f"{PREFIX}{place.module}{wrapper_path}.lora_{'A' if half == A else 'B'}.weight"
            pieces = dict.fromkeys(patterns[half] for patterns in by_row)  # A is the same for all rows
            adapter_halves.append(
                Half(
                    matrix.name + half,
                    shape,
                    tuple(piece(shape, ours, tensor_name, theirs, sizes) for ours, theirs in pieces),
                    place,
                )
            )
    owner_by_tensor: dict[str, str] = {}
    for adapter_half in adapter_halves:
        owner = owner_by_tensor.setdefault(adapter_half.tensor_name, adapter_half.parameter_name)
        if owner != adapter_half.parameter_name and adapter_half.parameter_name.endswith(A):
            problems.append(_inexpressible(adapter_half.parameter_name, family))
    if problems:
        raise SpecError(problems)
    return adapter_halves


def places_of(adapter_halves: Iterable[Half]) -> dict[str, AdapterPlace]:
    """Places of adapted matrices, by their names."""
    return {
        half.parameter_name.removesuffix(B): half.place for half in adapter_halves if half.parameter_name.endswith(B)
    }


def memory_rows(spec: LanguageModelSpec, family: Family, name: str) -> tuple[int | None, list[TensorRow]]:
    """(layer or None, rows of one of our matrices in the layout in memory); no rows unless a single tensor there
    contains the matrix."""
    layer, layouts = rows_of(spec, family, name)
    rows = layouts[-1] if layouts else []
    return layer, rows if len({row.tensor_name for row in rows}) == 1 else []


def adapter_tensors(spec: LanguageModelSpec, family: Family) -> set[str]:
    """Names of all parameters of the transformers model in memory."""
    names = set()
    for tensor in expected_tensors(spec):
        layer, layouts = rows_of(spec, family, tensor.name)
        names |= {row.name_in(layer) for row in (layouts[-1] if layouts else [])}
    return names


def _inexpressible(name: str, family: Family) -> Problem:
    rule = f"cannot be stored in PEFT's format for a {family.model_types[0]}"
    return Problem(
        "unsupported", "adapter.targets", name, rule, "remove it from targets, or merge the adapter into the weights"
    )


def _wraps_both(parameter: Parameter, table: Mapping[str, Parameter]) -> bool:
    """Whether both fused parameters of these experts have adapters, so that one wrapper is nested in the other."""
    return parameter.name.rpartition(".")[0] + f".w_out{B}" in table


def _patterns(parameter: Parameter, patterns: tuple[str, str]) -> dict[str, tuple[str, str]]:
    """(parameter pattern, PEFT pattern) of A and B, from the matrix's patterns."""
    parameter_dims, tensor_dims = (dimensions(pattern) for pattern in patterns)
    if parameter.of_experts:
        experts, inputs, outputs = parameter_dims
        tensor_dims.remove(experts)
        a_patterns = f"{experts} {inputs} rank", f"({experts} rank) {inputs}"
        b_patterns = f"{experts} rank {outputs}", f"(rank {experts})"
    else:
        outputs, inputs = parameter_dims if parameter.name.endswith(".weight") else reversed(parameter_dims)
        a_patterns = f"rank {inputs}", f"rank {inputs}"
        b_patterns = f"{outputs} rank", "rank"
    tensor_dims.remove(inputs)
    return {A: a_patterns, B: (b_patterns[0], f"{tensor_dims[0]} {b_patterns[1]}")}

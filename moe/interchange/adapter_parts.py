"""Matrices A and B of a model's adapters, and their names in PEFT's format, which follow PEFT's wrappers around the
modules of the transformers model. No torch.

There, experts are two fused parameters. A is `[E · r, in]`, expert by expert; B is `[out, r · E]`, with the rank as the
outer index of the columns.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from moe.interchange.family import Family, TensorRow, sizes_of
from moe.interchange.fitting import expected_tensors, rows_of
from moe.interchange.pieces import ParameterPiece, dimensions, piece
from moe.spec import LanguageModelSpec, Problem, SpecError, spec_error
from moe.spec.adapter import AdapterSpec
from moe.spec.adapter_names import EMBEDDING, MAGNITUDES, TABLES, TOKEN_ROWS, A, B, partner_of
from moe.spec.parameter import Parameter

PREFIX = "base_model.model."
FIRST, SECOND = ("gate_up_proj", "up_proj"), "down_proj"
"""Names of the fused parameters, of which the first is `up_proj` without a gate."""


_SAVED_MODULES = AdapterSpec(rank=1, modules_to_save=("embedding", "output"))


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
    """Matrix A or B of an adapter, or its magnitudes."""

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


def halves(spec: LanguageModelSpec, family: Family, *, has_expert_modules: bool = False) -> list[Half]:
    """A and B of each adapter of a model, and magnitudes; `has_expert_modules`: in the format of transformers 4, where
    each projection of each expert is a module. Raises SpecError for a matrix that the format cannot express."""
    assert spec.adapter is not None
    require_named_modules(family)
    table = {parameter.name: parameter for parameter in spec.parameters()}
    matrices = [parameter for name, parameter in table.items() if name + B in table]
    adapter_halves, problems = [], []
    for matrix in matrices:
        layer, rows = memory_rows(spec, family, matrix.name, in_hub=has_expert_modules)
        if not rows or (has_expert_modules and matrix.of_experts and not expert_modules(spec, family, matrix.name)):
            problems.append(_inexpressible(matrix.name, family))
            continue
        if has_expert_modules and matrix.of_experts:
            adapter_halves += _expert_halves(spec, family, matrix, table)
            continue
        sizes = {**sizes_of(spec), "rank": spec.adapter.rank_of(matrix.name)}
        is_module = has_expert_modules or spec.moe is None or ".attention." in matrix.name or matrix.name in TABLES
        place = AdapterPlace.from_row(rows[0], layer, is_module=is_module)
        is_swapped = family.swaps_expert_factors and matrix.of_experts
        by_row = [_patterns(matrix, row.patterns(len(matrix.shape), sizes), is_swapped=is_swapped) for row in rows]
        for half in by_row[0]:
            if matrix.name + half not in table:
                continue
            shape = table[matrix.name + half].shape
            wrapper_path = ".base_layer" if place.parameter in FIRST and _wraps_both(matrix, table) else ""
            ending = _ending(matrix.name, {A: B, B: A}[half] if is_swapped else half)
            tensor_name = f"{PREFIX}{place.module}{wrapper_path}.{ending}"
            pieces = dict.fromkeys(patterns[half] for patterns in by_row)  # A is the same for all rows
            adapter_halves.append(
                Half(
                    matrix.name + half,
                    shape,
                    tuple(
                        piece(shape, parameter_axes, tensor_name, tensor_axes, sizes)
                        for parameter_axes, tensor_axes in pieces
                    ),
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


def _ending(name: str, half: str) -> str:
    """End of the name of PEFT's tensor with A, B or magnitudes of a matrix."""
    if half == MAGNITUDES:
        return "lora_magnitude_vector"
    letter = "A" if half == A else "B"
    return f"lora_embedding_{letter}" if name == EMBEDDING else f"lora_{letter}.weight"


def token_row_pieces(spec: LanguageModelSpec, family: Family) -> dict[str, tuple[AdapterPlace, ParameterPiece]]:
    """Places and pieces of trained rows of tables, by the names of their parameters."""
    pieces, tables = {}, saved_modules(spec, family)
    for parameter in spec.parameters():
        if parameter.name.endswith(TOKEN_ROWS):
            place, _ = tables[parameter.name.removesuffix(TOKEN_ROWS) + ".weight"]
            name = f"{PREFIX}{place.module}.token_adapter.trainable_tokens_delta"
            pieces[parameter.name] = place, piece(parameter.shape, "token width", name, "token width")
    return pieces


def saved_modules(spec: LanguageModelSpec, family: Family) -> dict[str, tuple[AdapterPlace, ParameterPiece]]:
    """Places and pieces of modules that may be trained whole beside an adapter, by the names of their parameters."""
    modules = {}
    for parameter in spec.parameters():
        layer, rows = memory_rows(spec, family, parameter.name)
        if _SAVED_MODULES.saves(parameter.name) and len(rows) == 1:
            weight_piece = rows[0].piece(parameter.shape, layer, sizes_of(spec))
            place = AdapterPlace.from_row(rows[0], layer, is_module=True)
            modules[parameter.name] = place, replace(weight_piece, name=f"{PREFIX}{weight_piece.name}")
    return modules


def require_named_modules(family: Family) -> None:
    """Raise SpecError for a family that transformers lacks."""
    if not family.is_in_transformers:
        name = (family.text_family or family).model_types[0]
        rule = f"has no format in PEFT for a {name}: transformers has no class whose modules would name its tensors"
        raise spec_error(
            "unsupported", "adapter", None, rule, "train the adapter here and export merged weights (--merge)"
        )


def expert_modules(spec: LanguageModelSpec, family: Family, name: str) -> list[tuple[AdapterPlace, TensorRow]]:
    """Modules whose adapters make that of an expert's matrix in the format of transformers 4, with `{e}` for the
    expert, and their rows: gate and up, in this order, for either of them. Empty if experts are not modules there."""
    modules = []
    for part in sorted({name, partner_of(name)}):  # w_gate before w_in
        layer, rows = memory_rows(spec, family, part, in_hub=True)
        if not rows and part != name:  # a family without gates
            continue
        if len(rows) != 1 or "{e}" not in rows[0].tensor_name:
            return []
        modules.append((AdapterPlace.from_row(rows[0], layer, is_module=True), rows[0]))
    return modules


def _expert_halves(
    spec: LanguageModelSpec, family: Family, matrix: Parameter, table: Mapping[str, Parameter]
) -> list[Half]:
    """A and B of experts whose projections are modules. There, gate and up have an A each. Here they share A, of twice
    the rank: its columns are those of the gate's A, then the up's. Each B has rows for its own A, and zeros."""
    assert spec.adapter is not None
    modules = expert_modules(spec, family, matrix.name)
    number = len(modules)
    own_index = number - 1 if matrix.name.endswith("w_in") else 0
    sizes = {**sizes_of(spec), "rank": spec.adapter.rank_of(matrix.name) // number}
    expert_halves = []
    for half in (A, B):
        if matrix.name + half in table:
            shape = table[matrix.name + half].shape
            pieces = []
            for index, (place, row) in enumerate(modules):
                if half == A or index == own_index:
                    parameter_axes, tensor_axes = _patterns(matrix, row.patterns(len(matrix.shape), sizes))[half]
                    part = parameter_axes if number == 1 else parameter_axes.replace("rank", f"({index}/{number} rank)")
                    tensor_name = f"{PREFIX}{place.module}.lora_{'A' if half == A else 'B'}.weight"
                    pieces.append(piece(shape, part, tensor_name, tensor_axes, sizes))
            expert_halves.append(Half(matrix.name + half, shape, tuple(pieces), modules[own_index][0]))
    return expert_halves


def places_of(adapter_halves: Iterable[Half]) -> dict[str, AdapterPlace]:
    """Places of adapted matrices, by their names."""
    return {
        half.parameter_name.removesuffix(B): half.place for half in adapter_halves if half.parameter_name.endswith(B)
    }


def memory_rows(
    spec: LanguageModelSpec, family: Family, name: str, *, in_hub: bool = False
) -> tuple[int | None, list[TensorRow]]:
    """(layer or None, rows of one of our matrices in the layout in memory, or in the hub's, which is that in the memory
    of transformers 4); no rows unless a single tensor, or one for each expert, contains the matrix."""
    layer, layouts = rows_of(spec, family, name)
    rows = layouts[0 if in_hub else -1] if layouts else []
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


def _patterns(
    parameter: Parameter, patterns: tuple[str, str], *, is_swapped: bool = False
) -> dict[str, tuple[str, str]]:
    """(parameter pattern, PEFT pattern) of A, B and magnitudes, from the matrix's patterns; `is_swapped`: A is B in
    PEFT."""
    parameter_dims, tensor_dims = (dimensions(pattern) for pattern in patterns)
    if parameter.of_experts:
        experts, inputs, outputs = parameter_dims
        is_fused = experts in tensor_dims
        tensor_dims = [dimension for dimension in tensor_dims if dimension != experts]
        if is_swapped:
            tensor_dims.remove(inputs)
            return {A: (f"{experts} {inputs} rank", f"{inputs} (rank {experts})"),
                    B: (f"{experts} rank {outputs}", f"({experts} rank) {tensor_dims[0]}")}  # fmt: skip
        a_patterns = f"{experts} {inputs} rank", f"({experts} rank) {inputs}" if is_fused else f"rank {inputs}"
        b_patterns = f"{experts} rank {outputs}", f"(rank {experts})" if is_fused else "rank"
    else:
        is_transposed = parameter.name == EMBEDDING or not parameter.name.endswith(".weight")
        outputs, inputs = reversed(parameter_dims) if is_transposed else parameter_dims
        a_patterns = f"rank {inputs}", f"rank {inputs}"
        b_patterns = f"{outputs} rank", "rank"
    tensor_dims.remove(inputs)
    return {
        A: a_patterns, B: (b_patterns[0], f"{tensor_dims[0]} {b_patterns[1]}"), MAGNITUDES: (outputs, tensor_dims[0]),
    }  # fmt: skip

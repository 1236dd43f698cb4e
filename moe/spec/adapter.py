"""Low-rank adapters (LoRA), trained in place of a model's own weights."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, SerializerFunctionWrapHandler, StrictBool, model_serializer

from moe.spec.base import Count, Fraction, Positive, Spec, Text
from moe.spec.errors import Problem, ProblemCode
from moe.spec.form import stored_bytes
from moe.spec.parameter import Form, Parameter, Size
from moe.spec.patterns import layer_pattern, matches

_MATRIX = re.compile(
    r"(?P<kind>attention|dense|shared|experts)\.(?!convolution|\w*norm)(\w+\.weight|w_in|w_gate|w_out)$|(\brouter)$"
)
"""Names of matrices that can have adapters, apart from `_MAMBA_OUTPUT`: in layers, except convolutions, norms and the
gate of shared experts."""
_MAMBA_OUTPUT = ".out_projection.weight"
"""Mamba-2's last projection, to which PEFT applies no adapter, since fused kernels would ignore it."""
_GATE, _UP = "w_gate", "w_in"
"""Gate and up matrices of an expert, which have the same inputs and share A."""
Pattern = Annotated[Text, Field(min_length=1, max_length=256)]
_MAX_PATTERNS = 100
A, B = "_lora_a", "_lora_b"
"""Name suffixes of A and B, after the matrix's name."""


class AdapterGroupSpec(Spec):
    """Rank and alpha of some of an adapter's matrices."""

    pattern: Pattern
    """Pattern of matrix names, as in `targets`."""
    rank: Count | None = Field(default=None, le=65_536)
    """Default: the adapter's."""
    alpha: Positive | None = None
    """Default: the adapter's."""


class AdapterSpec(Spec):
    """LoRA adapters (arXiv 2106.09685): x · W becomes x · W + scale · (x · A) · B for each target matrix W. Only A and
    B are trained; B starts at zero.

    Each expert has its own. Its gate and up matrices share A, as in PEFT's adapters of fused experts.
    """

    rank: Count = Field(le=65_536)
    """r: columns of A, rows of B."""
    alpha: Positive | None = None
    """Numerator of the scale. Default: `rank`, for a scale of 1, or √rank if `rank_stabilized`."""
    rank_stabilized: StrictBool = False
    """Whether the scale is alpha / √rank (rsLoRA, arXiv 2312.03732) instead of alpha / rank."""
    targets: tuple[Pattern, ...] | None = Field(default=None, max_length=_MAX_PATTERNS)
    """Patterns of matrix names; `*` matches any characters, as in `*.experts.*`. Default: attention, feed-forward
    layers, shared experts and experts, but not routers."""
    groups: tuple[AdapterGroupSpec, ...] = Field(default=(), max_length=_MAX_PATTERNS)
    """Other ranks and alphas; a matrix belongs to the first group whose pattern matches it. PEFT's `rank_pattern` and
    `alpha_pattern`."""
    modules_to_save: tuple[Literal["embedding", "output"], ...] = Field(default=(), max_length=2)
    """Modules trained whole beside the adapter, and saved with it (PEFT's `modules_to_save`): `embedding`, and
    `output`, which computes logits."""
    dropout: Fraction = 0.0
    """Dropout probability of the inputs of A in training (PEFT's `lora_dropout`). Adapters of experts have none."""
    base: Literal["float32", "bfloat16", "int8", "nf4"] = "float32"
    """Storage format of the matrices of attention, feed-forward layers, shared experts and experts, with or without
    adapters: 4, 2, 1 or 0.5 bytes per weight; int8 and nf4 (QLoRA, arXiv 2305.14314) add 4 bytes per 64 weights.
    Dequantized for each product. Other weights stay in float32."""
    from_folder: Text | None = Field(
        default=None, max_length=4096, validation_alias=AliasChoices("from", "from_folder")
    )
    """Written `from`: folder in PEFT's format to start from, a path or fsspec URL under the service's data roots. Sets
    `rank`, `alpha`, `rank_stabilized`, `targets`, `groups` and `modules_to_save`, which must not be set to other
    values, and the default of `dropout`."""
    from_config: str | None = Field(default=None, pattern="^[0-9a-f]{16}$")
    """Digest of that folder's `adapter_config.json`, stored when it sets other fields. Those fields are refused if the
    config has changed."""

    @model_serializer(mode="wrap")
    def _as_written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write `from_folder` as `from`, a Python keyword."""
        return {("from" if name == "from_folder" else name): value for name, value in handler(self).items()}

    @property
    def default_alpha(self) -> float:
        return float(self.rank) if self.alpha is None else self.alpha

    def rank_of(self, name: str) -> int:
        """Rank of the adapter of the matrix of this name."""
        group = self._group_of(name)
        return self.rank if group is None or group.rank is None else group.rank

    def alpha_of(self, name: str) -> float:
        """Numerator of the scale of the adapter of the matrix of this name."""
        group = self._group_of(name)
        return self.default_alpha if group is None or group.alpha is None else group.alpha

    def _group_of(self, name: str) -> "AdapterGroupSpec | None":
        return next((group for group in self.groups if matches(group.pattern, name)), None)

    def scale_of(self, name: str) -> float:
        """Factor of x · A · B of the matrix of this name."""
        rank = self.rank_of(name)
        return float(self.alpha_of(name) / (rank**0.5 if self.rank_stabilized else rank))

    def saves(self, name: str) -> bool:
        """Whether the parameter of this name is trained whole."""
        return name.partition(".")[0] in self.modules_to_save

    def chooses(self, name: str) -> bool:
        """Whether the matrix of this name gets an adapter; other parameters never do."""
        if (match := _MATRIX.search(name)) is None or name.endswith(_MAMBA_OUTPUT):
            return False
        if self.targets is None:
            return match["kind"] is not None
        return any(matches(pattern, name) for pattern in self.targets)

    def adapter_of(self, parameter: Parameter, num_ranks: int) -> tuple[Parameter, ...]:
        """Adapter of a matrix, of rank r = `num_ranks`: A `[r, in]` and B `[out, r]`; for experts `[E, in, out]`, A
        `[E, in, r]` and B `[E, r, out]`. An expert's gate has only B: it shares A with the up matrix."""
        sides = list(zip(parameter.dims, parameter.shape, strict=True))
        rank: Size = ("none", num_ranks)
        if parameter.of_experts:
            experts, inputs, outputs = sides
            a, b = [experts, inputs, rank], [experts, rank, outputs]
        else:
            outputs, inputs = sides if parameter.name.endswith(".weight") else reversed(sides)
            a, b = [rank, inputs], [outputs, rank]
        a_matrix = _adapter_parameter(parameter.name + A, a, (3 * inputs[1]) ** -0.5)  # Uniform(±in^-½), as in PEFT
        b_matrix = _adapter_parameter(parameter.name + B, b, 0.0)
        shares = parameter.of_experts and parameter.name.endswith(_GATE)
        return (b_matrix,) if shares else (a_matrix, b_matrix)

    def target_ranks(self, path: str, parameters: Iterable[Parameter]) -> frozenset[tuple[str, int]]:
        """Names of the parameters of the block at `path` that get an adapter, with its rank."""
        names = {parameter.name: f"{path}.{parameter.name}" for parameter in parameters}
        return frozenset(
            (name, self.rank_of(full_name)) for name, full_name in names.items() if self.chooses(full_name)
        )

    def with_adapters(
        self, parameters: Iterable[Parameter], target_ranks: frozenset[tuple[str, int]]
    ) -> tuple[Parameter, ...]:
        """A block's parameters, frozen, with adapters of `target_ranks`."""
        ranks = dict(target_ranks)
        form: Form = "full" if self.base == "float32" else self.base
        base_parameters = [
            replace(parameter, frozen=True, form=form if is_base_matrix(parameter.name) else "full")
            for parameter in parameters
        ]
        return (
            *base_parameters,
            *(
                adapter
                for parameter in base_parameters
                if parameter.name in ranks
                for adapter in self.adapter_of(parameter, ranks[parameter.name])
            ),
        )

    def problems(self, names: Mapping[str, tuple[int, ...]]) -> Iterator[Problem]:
        """Problems with a model of these parameters, by name and shape."""
        target_shapes = {name: shape for name, shape in names.items() if self.chooses(name)}
        if self.targets == ():
            yield Problem("empty", "targets", [], "must name at least one matrix", "add one, or omit it")
        for index, pattern in enumerate(self.targets or ()):
            if not any(matches(pattern, name) for name in target_shapes):
                kinds = dict.fromkeys(layer_pattern(name) for name in names if _MATRIX.search(name))
                yield Problem("not_found", f"targets[{index}]", pattern, "is not a matrix that adapters apply to",
                              f"use one of {', '.join(kinds)}")  # fmt: skip
        for name in target_shapes:
            partner = partner_of(name)
            if partner in names and partner not in target_shapes:
                yield Problem("conflict", "targets", list(self.targets or ()),
                              f"has {name} without {partner}, and both share A",
                              "name both, as *.experts.* does, or neither")  # fmt: skip
                break
        smallest = min(target_shapes, key=lambda name: min(target_shapes[name][-2:]) - self.rank_of(name), default=None)
        if smallest is not None and self.rank_of(smallest) > (limit := min(target_shapes[smallest][-2:])):
            group = self._group_of(smallest)
            path = "rank" if group is None or group.rank is None else f"groups[{self.groups.index(group)}].rank"
            yield Problem("out_of_range", path, self.rank_of(smallest),
                          f"must be at most the smaller side (={limit}) of {smallest}, {list(target_shapes[smallest])}",
                          "lower it, or remove that matrix from targets")  # fmt: skip
        yield from self._problems_of_groups(target_shapes)

    def _problems_of_groups(self, target_names: Collection[str]) -> Iterator[Problem]:
        """Problems with groups of these matrices."""
        for index, group in enumerate(self.groups):
            matching = [name for name in target_names if matches(group.pattern, name)]
            if not any(self._group_of(name) is group for name in matching):
                code: ProblemCode = "duplicate" if matching else "not_found"
                rule = "matches only targets of earlier groups" if matching else "matches no target"
                yield Problem(code, f"groups[{index}].pattern", group.pattern, rule, "correct it, or remove the group")
        for name in target_names:
            values, partner = (self.rank_of(name), self.alpha_of(name)), partner_of(name)
            if values != (other_values := (self.rank_of(partner), self.alpha_of(partner))):
                yield Problem("conflict", "groups", [group.pattern for group in self.groups],
                              f"have (rank, alpha) {values} for {name} and {other_values} for {partner}, which share A",
                              "put both in one group")  # fmt: skip
                break


def partner_of(name: str) -> str:
    """Name of the matrix that shares A with a gate or up matrix of experts; other names unchanged."""
    if f"experts.{_GATE}" in name:
        return name.replace(_GATE, _UP)
    return name.replace(_UP, _GATE) if f"experts.{_UP}" in name else name


def _adapter_parameter(name: str, sides: Sequence[Size], std: float) -> Parameter:
    return Parameter(name, tuple(size for _, size in sides), tuple(dim for dim, _ in sides), std)


def a_name(name: str) -> str:
    """Name of the A of an adapted matrix."""
    return (partner_of(name) if _GATE in name else name) + A


def is_base_matrix(name: str) -> bool:
    """Whether `AdapterSpec.base` applies to this parameter."""
    match = _MATRIX.search(name)
    return match is not None and match["kind"] is not None


def describe_base(parameters: Iterable[Parameter], width: int) -> str:
    """Sentence about storage form and bytes of the frozen parameters, if unquantized weights take `width` bytes
    each."""
    frozen_parameters = [parameter for parameter in parameters if parameter.frozen]
    matrices = [parameter for parameter in frozen_parameters if parameter.form != "full"]
    rest = [parameter for parameter in frozen_parameters if parameter.form == "full"]
    full = f"float{8 * width}, {sum(stored_bytes(parameter, width) for parameter in rest):,} bytes"
    if not matrices:
        return f"the base is stored in {full}"
    num_bytes, number = (
        sum(stored_bytes(parameter, width) for parameter in matrices),
        sum(parameter.numel for parameter in matrices),
    )
    return (
        f"the base's matrices are stored in {matrices[0].form}, {number:,} weights in "
        f"{num_bytes:,} bytes, the rest of it in {full}"
    )


def is_adapter(name: str) -> bool:
    """Whether this parameter belongs to an adapter."""
    return name.endswith((A, B))

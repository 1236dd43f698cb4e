"""Low-rank adapters (LoRA), trained in place of a model's own weights."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, SerializerFunctionWrapHandler, StrictBool, model_serializer

from moe.spec.adapter_names import (
    EMBEDDING,
    GATE,
    MAGNITUDES,
    TABLES,
    A,
    B,
    is_base_matrix,
    is_target,
    kind_of,
    partner_of,
)
from moe.spec.base import Count, Fraction, Positive, Spec, Text
from moe.spec.errors import Problem, ProblemCode
from moe.spec.form import stored_bytes
from moe.spec.parameter import Derivation, Form, Parameter, Size
from moe.spec.patterns import layer_pattern, matches
from moe.spec.token_rows import TokenRowsSpec

Pattern = Annotated[Text, Field(min_length=1, max_length=256)]
_MAX_PATTERNS = 100


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
    B are trained; B starts at zero, or A for the embedding.

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
    layers, shared experts and experts, but not routers. `embedding.weight` and `output.weight` match only their full
    names."""
    dora: StrictBool = False
    """Weight-decomposed LoRA (DoRA, arXiv 2402.09353; PEFT's `use_dora`): each output of W + scale · A · B is divided
    by the norm of its column, a constant to gradients, and multiplied by a trained magnitude, initially W's norm. For
    attention, feed-forward layers of dense models and the output matrix; PEFT has none for other matrices."""
    groups: tuple[AdapterGroupSpec, ...] = Field(default=(), max_length=_MAX_PATTERNS)
    """Other ranks and alphas; a matrix belongs to the first group whose pattern matches it. PEFT's `rank_pattern` and
    `alpha_pattern`."""
    modules_to_save: tuple[Literal["embedding", "output"], ...] = Field(default=(), max_length=2)
    """Modules trained whole beside the adapter, and saved with it (PEFT's `modules_to_save`): `embedding`, and
    `output`, which computes logits."""
    trainable_token_indices: TokenRowsSpec | None = None
    """Rows of the embedding or the output matrix trained beside the adapter; all other rows are frozen."""
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
    `rank`, `alpha`, `rank_stabilized`, `targets`, `groups`, `dora`, `modules_to_save` and `trainable_token_indices`,
    which must not be set to other values, and the default of `dropout`."""
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
        if (kind := kind_of(name)) is None:
            return False
        if self.targets is None:
            return kind not in ("router", "table")
        return any(is_target(pattern, name) for pattern in self.targets)

    def adapter_of(self, parameter: Parameter, num_ranks: int) -> tuple[Parameter, ...]:
        """Adapter of a matrix, of rank r = `num_ranks`: A `[r, in]` and B `[out, r]`, and with DoRA magnitudes `[out]`;
        for experts `[E, in, out]`, A `[E, in, r]` and B `[E, r, out]`. An expert's gate has only B: it shares A with
        the up matrix. The embedding `[V, M]` has A `[r, V]` and B `[M, r]`."""
        sides = list(zip(parameter.dims, parameter.shape, strict=True))
        rank: Size = ("none", num_ranks)
        if parameter.of_experts:
            experts, inputs, outputs = sides
            a, b = [experts, inputs, rank], [experts, rank, outputs]
        else:
            is_transposed = parameter.name == EMBEDDING or not parameter.name.endswith(".weight")
            outputs, inputs = reversed(sides) if is_transposed else sides
            a, b = [rank, inputs], [outputs, rank]
        a_std, b_std = (3 * inputs[1]) ** -0.5, 0.0  # Uniform(±in^-½), as in PEFT
        if parameter.name == EMBEDDING:
            a_std, b_std = 0.0, 1.0
        a_matrix = _adapter_parameter(parameter.name + A, a, a_std)
        b_matrix = _adapter_parameter(parameter.name + B, b, b_std)
        if parameter.of_experts and parameter.name.endswith(GATE):
            return (b_matrix,)
        if not self.dora:
            return a_matrix, b_matrix
        magnitudes = replace(
            _adapter_parameter(parameter.name + MAGNITUDES, [outputs], 0.0), std=None, derivation=Derivation(parameter)
        )
        return a_matrix, b_matrix, magnitudes

    def with_table_adapter(self, table: Parameter) -> tuple[Parameter, ...]:
        """The embedding or the output matrix, frozen unless it is trained whole, with its adapter and trained rows."""
        table = replace(table, frozen=not self.saves(table.name))
        adapter = self.adapter_of(table, self.rank_of(table.name)) if self.chooses(table.name) else ()
        rows = None if self.trainable_token_indices is None else self.trainable_token_indices.parameter_of(table)
        return (table, *adapter, *(() if rows is None else (rows,)))

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

    def problems(self, names: Mapping[str, tuple[int, ...]], *, has_experts: bool) -> Iterator[Problem]:
        """Problems with a model of these parameters, by name and shape."""
        target_shapes = {name: shape for name, shape in names.items() if self.chooses(name)}
        if self.targets == ():
            yield Problem("empty", "targets", [], "must name at least one matrix", "add one, or omit it")
        for index, pattern in enumerate(self.targets or ()):
            if not any(is_target(pattern, name) for name in target_shapes):
                kinds = dict.fromkeys(layer_pattern(name) for name in names if kind_of(name))
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
        yield from self._problems_of_dora(target_shapes, has_experts=has_experts)
        for table in TABLES:
            if table in target_shapes and self.saves(table):
                yield Problem("conflict", "modules_to_save", list(self.modules_to_save),
                              f"has {table} whole, which is also a target", "omit one of them")  # fmt: skip

    def _problems_of_dora(self, target_names: Collection[str], *, has_experts: bool) -> Iterator[Problem]:
        """Problems with targets for which PEFT has no DoRA, or one with other norms."""
        for name in target_names if self.dora else ():
            kind = kind_of(name)
            if name == EMBEDDING:
                rule = "cannot apply to embedding.weight: PEFT takes its norms over the whole vocabulary"
            elif has_experts and kind not in ("attention", "table"):
                rule = f"cannot apply to {name}: PEFT wraps parameters, not modules, there, and has no DoRA for them"
            elif kind not in ("attention", "dense", "table"):
                rule = f"cannot apply to {name}"
            else:
                continue
            yield Problem("unsupported", "dora", True, rule,
                          "name attention alone, `targets: ['*.attention.*']`, or omit dora")  # fmt: skip
            return

    def problems_of_token_rows(self, vocab_size: int, *, tie_embeddings: bool) -> Iterator[Problem]:
        """Problems with the rows that are trained of a model's tables."""
        if (rows := self.trainable_token_indices) is None:
            return
        for problem in rows.problems(vocab_size, tie_embeddings=tie_embeddings):
            yield replace(problem, path=f"trainable_token_indices.{problem.path}")
        for table in TABLES:
            if rows.ids_of(table) and (self.saves(table) or self.chooses(table)):
                name = table.partition(".")[0]
                rule = f"names rows of {name}, which modules_to_save or targets train, too"
                yield Problem("conflict", f"trainable_token_indices.{name}", list(rows.ids_of(table)), rule,
                              "omit one of them")  # fmt: skip

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


def _adapter_parameter(name: str, sides: Sequence[Size], std: float) -> Parameter:
    return Parameter(name, tuple(size for _, size in sides), tuple(dim for dim, _ in sides), std)


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

"""Rules of operators: which of their dimensions correspond, so that a mesh axis may split them. No torch.

A rule is an index equation. Every dimension of every operand and result is a list of *factors*, the major one first:
`bmk,bkn->bmn` has four, and the rule of `[a, b] -> [a * b]` writes the result's only dimension as `(a, b)`. Along one
mesh axis an operator has one `AxisOption`: it splits one factor everywhere, lets partial results through, runs an
exchange of its own, or does none of these. (Shardy's factors; GShard's section 3.3.)
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from moe.sharding.placement import WHOLE, AxisPlacement, Combine, Placements, partial, split

Factor = str
Dims = tuple[tuple[Factor, ...], ...]
"""Factors of each dimension of one tensor, the major one first; a dimension without factors is never split."""

Work = Literal["none", "memory", "product", "attention"]
"""What determines an operator's time: nothing (a view), memory access, or arithmetic of a matrix product or of fused
attention."""

Lower = Callable[[Any], Any]
"""Writes the local operators of one rank, given the `LocalCall`; the default calls the operator itself on the parts."""


@dataclass(frozen=True)
class AxisOption:
    """Placements of an operator's tensors along one mesh axis."""

    name: str
    """Name for explanations: `whole`, `split m`, `partial sum [0]`."""
    operands: tuple[AxisPlacement, ...]
    results: tuple[AxisPlacement, ...]
    factor: Factor | None = None
    """The factor that is split."""
    exchange: "Exchange | None" = None
    """An exchange that is part of the operator."""


Options = tuple[AxisOption, ...]
"""Options of one operator, one for each mesh axis."""


def operand_placements(options: Options, operand: int) -> Placements:
    return tuple(option.operands[operand] for option in options)


def result_placements(options: Options, result: int = 0) -> Placements:
    return tuple(option.results[result] for option in options)


@dataclass(frozen=True, eq=False)
class Exchange:
    """A way to run an operator on parts along one axis that needs communication within the operator.

    The axis splits dimension `operands[i]` of operand i (None: it is whole) and `results[j]` of result j (None: it is
    whole, or, where `combine` says how they are combined, in partial results).
    """

    name: str
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    moved_bytes: Callable[[int], float]
    """Function of the number of ranks along the axis: bytes that each rank sends if no other axis splits anything."""
    lower: Callable[[Any, int], Any]
    """Writes the local operators, given the `LocalCall` and the axis."""
    kind: Literal["halo", "all_to_all", "gather", "ring"] = "halo"
    times: int = 1
    """Number of collectives, one after the other, that move these bytes."""
    combine: Combine | None = None
    shared: frozenset[Factor] = frozenset()
    """Factors that other axes may split in the same dimensions, since the exchange does not depend on the order of
    parts."""


@dataclass(frozen=True)
class GroupedMatmul:
    """A product of groups of rows, each with its own matrix, such as those of experts."""

    groups: Factor
    rows: Factor
    per_row: int
    """Number of groups that each row is in."""
    passes: int
    """Duration in forward passes: 2 for a backward pass."""


@dataclass(frozen=True, eq=False)
class Rule:
    """The index equation of one operator in a graph."""

    operands: tuple[Dims, ...]
    """Dims of its tensor operands, in the order of its arguments."""
    results: tuple[Dims, ...]
    sizes: Mapping[Factor, int]
    combine: Mapping[Factor, Combine] = field(default_factory=dict)
    """Operation that combines partial results if a split factor is missing in a result. A factor that is missing in a
    result and here is never split."""
    whole_factors: frozenset[Factor] = frozenset()
    """Factors that are never split."""
    linear: tuple[frozenset[int], ...] = ()
    """Sets of operands in which the operator is linear: on partial sums of these, its results are partial sums."""
    passes: frozenset[Combine] = frozenset({"sum"})
    """Kinds of partial results that `linear` holds for: a view also passes partial maxima."""
    added: frozenset[int] = frozenset()
    """Operands that are added to the rest: if results are partial sums, only the first rank adds them."""
    indices: frozenset[int] = frozenset()
    """Operands of positions, whose padding must be valid positions, too."""
    identity: Mapping[int, float] = field(default_factory=dict)
    """Value for the padding of an operand, by its number: of a reduced dimension, if it is not the identity of
    `combine`; of an operand of positions, if 0 is not valid."""
    unmasked: frozenset[int] = frozenset()
    """Operands whose padding the lowered operator ignores."""
    replicated_results: frozenset[int] = frozenset()
    """Results that are the same on all ranks for any split, or are not tensors."""
    any_size: bool = False
    """Whether a dimension may be split into more parts than it has rows, because a hint requests it."""
    work: Work = "memory"
    flops: float = 2.0
    """Operations of a product for each combination of its factors' indices."""
    grouped: GroupedMatmul | None = None
    saved_elements: Callable[[Mapping[Factor, float]], float] | None = None
    """Function of the sizes of factors on a rank: number of values that a rank saves for the operator's gradients
    besides operands and results."""
    exchanges: tuple[Exchange, ...] = ()
    extra_options: tuple[AxisOption, ...] = ()
    """Further options that do not follow from the equation. Their parts have no padding."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of operands and results, if there are `extra_options`."""
    by_axis: tuple[str, ...] = ()
    """Names of the required options, one for each axis; empty if the options are free."""
    lower: Lower | None = None
    gradients_of: Any = None
    """The forward operator in the graph that saves values for this gradient besides its results. A rank keeps these
    values if both operators have the same options."""

    @property
    def is_product(self) -> bool:
        return self.work in ("product", "attention")

    def axis_options(self) -> tuple[AxisOption, ...]:
        """Along any axis: whole first, then factors in order, partial results, exchanges."""
        return self._axis_options

    @cached_property
    def _axis_options(self) -> tuple[AxisOption, ...]:
        whole_option = AxisOption("whole", (WHOLE,) * len(self.operands), (WHOLE,) * len(self.results))
        return (whole_option, *self._factors(), *self._linear(), *self._exchanges(), *self.extra_options)

    def _factors(self) -> Iterator[AxisOption]:
        for factor in self.sizes:
            operands = [_place(dims, factor) for dims in self.operands]
            results = [_place(dims, factor) for dims in self.results]
            if (
                factor in self.whole_factors
                or None in operands
                or None in results
                or (self.sizes[factor] < 2 and not self.any_size)
            ):
                continue
            if self.is_reduced(factor):
                if factor not in self.combine:
                    continue
                partial_result = partial(self.combine[factor])
                results = [
                    partial_result if placement == WHOLE and number not in self.replicated_results else placement
                    for number, placement in enumerate(results)
                ]
            yield AxisOption(f"split {factor}", tuple(operands), tuple(results), factor)  # type: ignore[arg-type]

    def _linear(self) -> Iterator[AxisOption]:
        for combine in sorted(self.passes):
            for operand_numbers in self.linear:
                operands = tuple(
                    partial(combine) if number in operand_numbers else WHOLE for number in range(len(self.operands))
                )
                results = (partial(combine),) * len(self.results)
                yield AxisOption(f"partial {combine} {sorted(operand_numbers)}", operands, results)

    def _exchanges(self) -> Iterator[AxisOption]:
        for exchange in self.exchanges:
            result_placement = WHOLE if exchange.combine is None else partial(exchange.combine)
            operands = tuple(WHOLE if dim is None else split(dim) for dim in exchange.operands)
            results = tuple(result_placement if dim is None else split(dim) for dim in exchange.results)
            yield AxisOption(f"exchange {exchange.name}", operands, results, exchange=exchange)

    def is_possible(self, options: Sequence[AxisOption], degrees: Sequence[int]) -> bool:
        """Whether an operator may have these options, one an axis, on a mesh of these degrees.

        A factor that is not alone in its dimension is split evenly, or boundaries would move. An exchange has its
        dimensions for itself.
        """
        if self.extra_options and not self._is_even(options, degrees):
            return False
        if self.by_axis and tuple(option.name for option in options) != self.by_axis:
            return False
        parts: dict[Factor, int] = {}
        for option, degree in zip(options, degrees, strict=True):
            if option.factor is not None:
                parts[option.factor] = parts.get(option.factor, 1) * degree
        for factor, count in parts.items():
            if (self.sizes[factor] < count and not self.any_size) or (
                self.sizes[factor] % count and factor in self._joint_factors
            ):
                return False
        for axis, option in enumerate(options):
            if option.exchange is None:
                continue
            for other_option in (*options[:axis], *options[axis + 1 :]):
                pairs = zip(
                    (*option.operands, *option.results), (*other_option.operands, *other_option.results), strict=True
                )
                if other_option.exchange is None and other_option.factor in option.exchange.shared:
                    continue
                if other_option.exchange is not None or any(
                    placement.dim is not None and placement.dim == other_placement.dim
                    for placement, other_placement in pairs
                ):
                    return False
        # Partial sums of the one kind do not lie across those of another.
        for placements in zip(*(option.operands for option in options), strict=True) if self.operands else ():
            if len({placement.combine for placement in placements} - {None}) > 1:
                return False
        for placements in zip(*(option.results for option in options), strict=True):
            if len({placement.combine for placement in placements} - {None}) > 1:
                return False
        return True

    def _is_even(self, options: Sequence[AxisOption], degrees: Sequence[int]) -> bool:
        """Whether no part of any tensor has padding."""
        for tensor, shape in enumerate(self.shapes):
            placements = [(*option.operands, *option.results)[tensor] for option in options]
            for dim, size in enumerate(shape):
                if size % math.prod(
                    degree for placement, degree in zip(placements, degrees, strict=True) if placement.dim == dim
                ):
                    return False
        return True

    @cached_property
    def _joint_factors(self) -> frozenset[Factor]:
        """Factors that share a dimension with others somewhere."""
        dims = (dim for tensor in (*self.operands, *self.results) for dim in tensor if len(dim) > 1)
        return frozenset(factor for dim in dims for factor in dim)

    def is_reduced(self, factor: Factor) -> bool:
        """Whether some result lacks the factor."""
        return any(
            _place(dims, factor) == WHOLE
            for number, dims in enumerate(self.results)
            if number not in self.replicated_results
        )


def _place(dims: Dims, factor: Factor) -> AxisPlacement | None:
    """Placement of a tensor whose factor an axis splits: WHOLE where it lacks the factor, None where the factor is not
    the major one, so that its parts would not be contiguous."""
    for dim, factors in enumerate(dims):
        if factor in factors:
            return split(dim) if factors[0] == factor else None
    return WHOLE

"""Which element of their tensor is which of ours, in one small language of axes.

Each side of a piece is a pattern, one term for each dimension:

    h m          two dimensions, each an axis
    (h g)        one dimension made of two axes, the last running fastest
    (0/2 h)      one place of an axis of two: the first half of the rows; `(h 1/2)` is every second one, from 1 on
    (j d@4/12)   an axis that begins at place 4 of 12
    (j d)@8/32   a dimension of which this is the part that begins at 8, of 32
    1            a dimension of one

An axis that is in a name, `experts.{e}.up_proj.weight`, counts tensors, and along `n` ours may have what theirs has
once. Both sides are strided views over the same axes, so that any rectangle of either is computed from rectangles of
the other, and nothing else of it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import ceil, prod

from moe.spec.parameter import Slices

Box = Mapping[str, tuple[int, int]]
"""(first, end) of each axis."""

IN_NAME = "e"
"""The axis that a name may have."""
COPIES = "n"
"""The axis of ours that theirs may lack."""
_TERM = re.compile(r"\([^()]*\)(?:@\d+/\d+)?|[^\s()]+")
_PART = re.compile(r"(?P<axis>[a-z]\w*)(?:@(?P<begin>\d+)/(?P<of>\d+))?|(?P<place>\d+)/(?P<places>\d+)|(?P<one>1)")


@dataclass(frozen=True)
class DimensionFactor:
    """One factor of a dimension: an axis or a fixed place, at `begin` of `total` places; None are as many as the axis
    is long."""

    axis: str | None
    begin: int = 0
    total: int | None = None


@dataclass(frozen=True)
class Dimension:
    """One dimension of a pattern: its factors, outermost first, and the part of it that they are."""

    terms: tuple[DimensionFactor, ...]
    begin: int = 0
    total: int | None = None


def dimensions(pattern: str) -> list[str]:
    """The pattern of each dimension."""
    assert not _TERM.sub("", pattern).strip(), pattern
    return _TERM.findall(pattern)


def parse_pattern(pattern: str) -> tuple[Dimension, ...]:
    """The dimensions that a pattern names."""
    return tuple(map(_dimension, dimensions(pattern)))


def _dimension(text: str) -> Dimension:
    if not text.startswith("("):
        return Dimension((_term(text),))
    inner, _, part = text[1:].partition(")")
    terms = tuple(map(_term, inner.split()))
    if not part:
        return Dimension(terms)
    begin, _, total = part[1:].partition("/")
    return Dimension(terms, int(begin), int(total))


def _term(text: str) -> DimensionFactor:
    match = _PART.fullmatch(text)
    assert match is not None, text
    if match["axis"]:
        return DimensionFactor(match["axis"], int(match["begin"] or 0), int(match["of"]) if match["of"] else None)
    return DimensionFactor(None, int(match["place"] or 0), int(match["places"] or 1))


@dataclass(frozen=True)
class Side:
    """One tensor of a piece as a strided view: where the view begins, and the dimension and step of each axis."""

    shape: tuple[int, ...]
    first: tuple[int, ...]
    steps: Mapping[str, tuple[int, int]]
    """(dimension, step) by axis."""
    lengths: Mapping[str, int]

    def boxes(self, slices: Sequence[tuple[int, int]]) -> Iterator[dict[str, tuple[int, int]]]:
        """Boxes of axes that together are what the view has within a rectangle of the tensor, without overlap."""
        by_dim = [
            list(self._along(dim, self._axes_of(dim), self.first[dim], *within)) for dim, within in enumerate(slices)
        ]
        for dim_boxes in product(*by_dim):
            yield {axis: part for dim_box in dim_boxes for axis, part in dim_box.items()}

    def _axes_of(self, dim: int) -> list[tuple[str, int]]:
        axis_steps = [(axis, step) for axis, (of, step) in self.steps.items() if of == dim]
        return sorted(axis_steps, key=lambda axis_step: -axis_step[1])

    def _along(
        self, dim: int, axes: list[tuple[str, int]], base: int, first: int, end: int
    ) -> Iterator[dict[str, tuple[int, int]]]:
        if not axes:
            if first <= base < end:
                yield {}
            return
        (axis, step), inner = axes[0], axes[1:]
        span = sum((self.lengths[name] - 1) * by for name, by in inner)
        length = self.lengths[axis]
        overlap = range(max(0, ceil((first - base - span) / step)), min(length, ceil((end - base) / step)))
        whole = range(max(0, ceil((first - base) / step)), min(length, (end - 1 - base - span) // step + 1))
        if whole and overlap:
            yield {axis: (whole.start, whole.stop)} | {name: (0, self.lengths[name]) for name, _ in inner}
        for at in overlap:
            if at not in whole:
                for rest in self._along(dim, inner, base + at * step, first, end):
                    yield {axis: (at, at + 1)} | rest

    def bounds(self, box: Box) -> Slices:
        """The least rectangle of the tensor that has a box."""
        intervals = []
        for dim, first in enumerate(self.first):
            parts = [(step, box[axis]) for axis, (of, step) in self.steps.items() if of == dim]
            low = first + sum(step * begin for step, (begin, _) in parts)
            intervals.append((low, low + sum(step * (end - 1 - begin) for step, (begin, end) in parts) + 1))
        return tuple(intervals)

    def strides(self, axes: Sequence[str], of_tensor: Sequence[int]) -> tuple[int, ...]:
        """Strides of the view, for axes in order, in memory whose dimensions have those strides; 0 for an axis that it
        does not have."""
        strides = []
        for axis in axes:
            dim, step = self.steps.get(axis, (None, 0))
            strides.append(0 if dim is None else of_tensor[dim] * step)
        return tuple(strides)


@dataclass(frozen=True)
class ParameterPiece:
    """Part of one parameter of ours, or all of it, and the tensors that it is in."""

    our_side: Side
    name: str
    """Name of their tensor, with `{e}` where the axis of experts counts tensors."""
    their_side: Side
    axes: tuple[str, ...]
    """In the order of ours."""
    factor: float = 1.0
    """Ours over theirs."""

    @cached_property
    def counts_tensors(self) -> bool:
        return "{" + IN_NAME + "}" in self.name

    def names(self) -> list[str]:
        """Every tensor that it is in."""
        if not self.counts_tensors:
            return [self.name]
        return [self.tensor_name(at) for at in range(self.our_side.lengths[IN_NAME])]

    def tensor_name(self, at: int) -> str:
        return self.name.replace("{" + IN_NAME + "}", str(at))

    def by_tensor(self, box: Box) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
        """A box, tensor by tensor."""
        if not self.counts_tensors:
            yield self.name, dict(box)
            return
        for at in range(*box[IN_NAME]):
            yield self.tensor_name(at), {**box, IN_NAME: (at, at + 1)}


def split(box: Box, side: Side, max_elements: int) -> Iterator[dict[str, tuple[int, int]]]:
    """A box in parts that have at most so many elements, as their rectangles do, or one of each axis; in the order of
    memory."""
    bounds = side.bounds(box)
    if max(prod(end - first for first, end in ranges) for ranges in (bounds, box.values())) <= max_elements:
        yield dict(box)
        return
    long = [axis for axis, (first, end) in box.items() if end - first > 1]
    if not long:
        yield dict(box)
        return
    last = len(side.shape), 0  # what the side does not have, so that copies are made of one read
    places = {axis: side.steps.get(axis, last) for axis in long}
    axis = min(long, key=lambda name: (places[name][0], -places[name][1]))
    first, end = box[axis]
    middle = (first + end) // 2
    yield from split({**box, axis: (first, middle)}, side, max_elements)
    yield from split({**box, axis: (middle, end)}, side, max_elements)


def piece(
    our_shape: Sequence[int],
    our_pattern: str,
    name: str,
    their_pattern: str,
    sizes: Mapping[str, int] | None = None,
    factor: float = 1.0,
) -> ParameterPiece:
    """The piece that two patterns say, of a parameter of that shape, which is `factor` times theirs; `sizes` are
    lengths of axes that its shape does not tell."""
    our_dims, their_dims = parse_pattern(our_pattern), parse_pattern(their_pattern)
    lengths = dict(sizes or {})
    assert len(our_dims) == len(our_shape), f"{our_pattern} of {list(our_shape)}"
    for dimension, size in zip(our_dims, our_shape, strict=True):
        if dimension.total is not None:
            continue
        unknown = [term for term in dimension.terms if term.axis and term.total is None and term.axis not in lengths]
        known_size = prod(_places(term, lengths) for term in dimension.terms if term not in unknown)
        if unknown:
            assert len(unknown) == 1, f"{our_pattern} of {list(our_shape)}"
            assert size % known_size == 0, f"{our_pattern} of {list(our_shape)}"
            assert unknown[0].axis is not None
            lengths[unknown[0].axis] = size // known_size
    our_side, their_side = _side(our_dims, lengths), _side(their_dims, lengths)
    assert our_side.shape == tuple(our_shape), f"{our_pattern} is {our_side.shape}, not {list(our_shape)}"
    name_axes = {IN_NAME} if "{" + IN_NAME + "}" in name else set()
    once = {COPIES} & our_side.steps.keys()
    assert our_side.steps.keys() == their_side.steps.keys() | name_axes | once, (
        f"{our_pattern} has other axes than {their_pattern}"
    )
    return ParameterPiece(our_side, name, their_side, tuple(our_side.steps), factor)


def _places(term: DimensionFactor, lengths: Mapping[str, int]) -> int:
    if term.total is not None:
        return term.total
    assert term.axis is not None
    return lengths[term.axis]


def _side(pattern: tuple[Dimension, ...], lengths: Mapping[str, int]) -> Side:
    shape, first, steps = [], [], {}
    for dim, dimension in enumerate(pattern):
        step, begin = 1, dimension.begin
        for term in reversed(dimension.terms):
            if term.axis is not None:
                steps[term.axis] = (dim, step)
            begin += term.begin * step
            step *= _places(term, lengths)
        shape.append(step if dimension.total is None else dimension.total)
        first.append(begin)
    in_order = {  # outermost first
        axis: steps[axis] for dimension in pattern for term in dimension.terms if (axis := term.axis)
    }
    return Side(tuple(shape), tuple(first), in_order, {axis: lengths[axis] for axis in in_order})

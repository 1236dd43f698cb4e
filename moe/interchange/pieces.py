"""Maps elements of Hugging Face tensors to elements of our parameters by patterns of axes.

Each side of a piece has a pattern with one term per dimension:

    h m          two dimensions, one axis each
    (h g)        one dimension composed of two axes, the last varying fastest
    (0/2 h)      index 0 of an axis of length 2: the first half of the rows; `(h 1/2)` is every second row, from 1 on
    (j d@4/12)   an axis that starts at index 4 of 12
    (j d)@8/32   the part of a dimension of length 32 that starts at 8
    1            a dimension of length 1

An axis in a name, `experts.{e}.up_proj.weight`, enumerates tensors. Along `n`, our parameter may have copies of the
tensor. Both sides are strided views over the same axes, so that a rectangle of one is computed from only the
corresponding rectangles of the other.
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
"""Axis that a name may contain."""
COPIES = "n"
"""Axis of our parameter that the tensor may lack."""
_TERM = re.compile(r"\([^()]*\)(?:@\d+/\d+)?|[^\s()]+")
_PART = re.compile(r"(?P<axis>[a-z]\w*)(?:@(?P<begin>\d+)/(?P<of>\d+))?|(?P<place>\d+)/(?P<places>\d+)|(?P<one>1)")


@dataclass(frozen=True)
class DimensionFactor:
    """Factor of a dimension: an axis or a fixed index, starting at `begin` of `total`; None is the axis's length."""

    axis: str | None
    begin: int = 0
    total: int | None = None


@dataclass(frozen=True)
class Dimension:
    """Dimension of a pattern: its factors, outermost first, which cover it from `begin` on, out of `total`."""

    terms: tuple[DimensionFactor, ...]
    begin: int = 0
    total: int | None = None


def dimensions(pattern: str) -> list[str]:
    """Split a pattern into one pattern per dimension."""
    assert not _TERM.sub("", pattern).strip(), pattern
    return _TERM.findall(pattern)


def parse_pattern(pattern: str) -> tuple[Dimension, ...]:
    """Parse the dimensions of a pattern."""
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
    """Strided view of one tensor of a piece: its start, and the dimension and step of each axis."""

    shape: tuple[int, ...]
    first: tuple[int, ...]
    steps: Mapping[str, tuple[int, int]]
    """(dimension, step) by axis."""
    lengths: Mapping[str, int]

    def boxes(self, slices: Sequence[tuple[int, int]]) -> Iterator[dict[str, tuple[int, int]]]:
        """Yield disjoint boxes that cover the view's elements within a rectangle of the tensor."""
        by_dim = [
            list(self._axis_boxes(dim, self._axes_of(dim), self.first[dim], *bounds))
            for dim, bounds in enumerate(slices)
        ]
        for dim_boxes in product(*by_dim):
            yield {axis: part for dim_box in dim_boxes for axis, part in dim_box.items()}

    def _axes_of(self, dim: int) -> list[tuple[str, int]]:
        axis_steps = [(axis, step) for axis, (axis_dim, step) in self.steps.items() if axis_dim == dim]
        return sorted(axis_steps, key=lambda axis_step: -axis_step[1])

    def _axis_boxes(
        self, dim: int, axes: list[tuple[str, int]], base: int, first: int, end: int
    ) -> Iterator[dict[str, tuple[int, int]]]:
        if not axes:
            if first <= base < end:
                yield {}
            return
        (axis, step), inner_axes = axes[0], axes[1:]
        span = sum((self.lengths[name] - 1) * inner_step for name, inner_step in inner_axes)
        length = self.lengths[axis]
        overlap = range(max(0, ceil((first - base - span) / step)), min(length, ceil((end - base) / step)))
        full_range = range(max(0, ceil((first - base) / step)), min(length, (end - 1 - base - span) // step + 1))
        if full_range and overlap:
            yield {axis: (full_range.start, full_range.stop)} | {
                name: (0, self.lengths[name]) for name, _ in inner_axes
            }
        for index in overlap:
            if index not in full_range:
                for inner_box in self._axis_boxes(dim, inner_axes, base + index * step, first, end):
                    yield {axis: (index, index + 1)} | inner_box

    def bounds(self, box: Box) -> Slices:
        """Smallest rectangle of the tensor that contains a box."""
        intervals = []
        for dim, first in enumerate(self.first):
            parts = [(step, box[axis]) for axis, (axis_dim, step) in self.steps.items() if axis_dim == dim]
            low = first + sum(step * begin for step, (begin, _) in parts)
            intervals.append((low, low + sum(step * (end - 1 - begin) for step, (begin, end) in parts) + 1))
        return tuple(intervals)

    def strides(self, axes: Sequence[str], tensor_strides: Sequence[int]) -> tuple[int, ...]:
        """Strides of the view's axes, in order, for a tensor with strides `tensor_strides`; 0 for axes that the view
        lacks."""
        strides = []
        for axis in axes:
            dim, step = self.steps.get(axis, (None, 0))
            strides.append(0 if dim is None else tensor_strides[dim] * step)
        return tuple(strides)


@dataclass(frozen=True)
class ParameterPiece:
    """Parameter of ours, or a part of it, and the Hugging Face tensors that contain it."""

    parameter_side: Side
    name: str
    """Name of the Hugging Face tensor, with `{e}` for the expert if each expert has its own tensor."""
    tensor_side: Side
    axes: tuple[str, ...]
    """Axes in the order of `parameter_side`."""
    factor: float = 1.0
    """Values of the parameter divided by those of the tensor."""

    @cached_property
    def is_per_expert(self) -> bool:
        return "{" + IN_NAME + "}" in self.name

    def names(self) -> list[str]:
        """Names of all tensors that contain it."""
        if not self.is_per_expert:
            return [self.name]
        return [self.tensor_name(index) for index in range(self.parameter_side.lengths[IN_NAME])]

    def tensor_name(self, index: int) -> str:
        return self.name.replace("{" + IN_NAME + "}", str(index))

    def by_tensor(self, box: Box) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
        """Split a box by tensor: (name, box) pairs."""
        if not self.is_per_expert:
            yield self.name, dict(box)
            return
        for index in range(*box[IN_NAME]):
            yield self.tensor_name(index), {**box, IN_NAME: (index, index + 1)}


def split(box: Box, side: Side, max_elements: int) -> Iterator[dict[str, tuple[int, int]]]:
    """Split a box into parts of at most `max_elements`, counted in the box and in its rectangle, or down to single
    elements; in memory order."""
    bounds = side.bounds(box)
    if max(prod(end - first for first, end in ranges) for ranges in (bounds, box.values())) <= max_elements:
        yield dict(box)
        return
    splittable_axes = [axis for axis, (first, end) in box.items() if end - first > 1]
    if not splittable_axes:
        yield dict(box)
        return
    last = len(side.shape), 0  # axes that the side lacks come last, so that one read serves all copies
    places = {axis: side.steps.get(axis, last) for axis in splittable_axes}
    axis = min(splittable_axes, key=lambda name: (places[name][0], -places[name][1]))
    first, end = box[axis]
    middle = (first + end) // 2
    yield from split({**box, axis: (first, middle)}, side, max_elements)
    yield from split({**box, axis: (middle, end)}, side, max_elements)


def piece(
    shape: Sequence[int],
    parameter_pattern: str,
    name: str,
    tensor_pattern: str,
    sizes: Mapping[str, int] | None = None,
    factor: float = 1.0,
) -> ParameterPiece:
    """Piece from two patterns, for a parameter of this shape, which is `factor` times the tensor. `sizes`:
    lengths of axes that the shape does not determine."""
    parameter_dims, tensor_dims = parse_pattern(parameter_pattern), parse_pattern(tensor_pattern)
    lengths = dict(sizes or {})
    assert len(parameter_dims) == len(shape), f"{parameter_pattern} of {list(shape)}"
    for dimension, size in zip(parameter_dims, shape, strict=True):
        if dimension.total is not None:
            continue
        unknown = [term for term in dimension.terms if term.axis and term.total is None and term.axis not in lengths]
        known_size = prod(_places(term, lengths) for term in dimension.terms if term not in unknown)
        if unknown:
            assert len(unknown) == 1, f"{parameter_pattern} of {list(shape)}"
            assert size % known_size == 0, f"{parameter_pattern} of {list(shape)}"
            assert unknown[0].axis is not None
            lengths[unknown[0].axis] = size // known_size
    parameter_side, tensor_side = _side(parameter_dims, lengths), _side(tensor_dims, lengths)
    assert parameter_side.shape == tuple(shape), f"{parameter_pattern} is {parameter_side.shape}, not {list(shape)}"
    name_axes = {IN_NAME} if "{" + IN_NAME + "}" in name else set()
    copy_axes = {COPIES} & parameter_side.steps.keys()
    assert parameter_side.steps.keys() == tensor_side.steps.keys() | name_axes | copy_axes, (
        f"{parameter_pattern} and {tensor_pattern} have different axes"
    )
    return ParameterPiece(parameter_side, name, tensor_side, tuple(parameter_side.steps), factor)


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
    ordered_steps = {  # outermost first
        axis: steps[axis] for dimension in pattern for term in dimension.terms if (axis := term.axis)
    }
    return Side(tuple(shape), tuple(first), ordered_steps, {axis: lengths[axis] for axis in ordered_steps})

"""The language of axes: converting any rectangle of either side gives that rectangle of the whole conversion."""

import string
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe.interchange.copying import fill_folder_tensor, fill_parameter
from moe.interchange.pieces import ParameterPiece, parse_pattern, piece, split
from moe.spec.parameter import Slices

CASES: dict[str, list[ParameterPiece]] = {
    "same": [piece((6, 5), "a b", "t", "a b")],
    "turned": [piece((6, 5), "a b", "t", "b a")],
    "a vector": [piece((7,), "a", "t", "a")],
    "a tensor an expert": [piece((3, 4, 5), "e m h", "t{e}", "h m")],
    "first half": [piece((3, 4, 5), "e m h", "t", "e (0/2 h) m")],
    "second half": [piece((3, 4, 5), "e m h", "t", "e (1/2 h) m")],
    "even columns": [piece((3, 4, 5), "e m h", "t", "e m (h 0/2)")],
    "a gate": [piece((6, 1), "m 1", "t", "1 m")],
    "one kind after another": [
        piece((22, 3), "(j q@0/11) w", "t", "(j q)@0/22 1 w", {"j": 2, "q": 3}),
        piece((22, 3), "(j q@3/11) w", "t", "(j q)@6/22 1 w", {"j": 2, "q": 3}),
        piece((22, 3), "(j q@6/11) w", "t", "(j q)@12/22 1 w", {"j": 2, "q": 5}),
    ],
    "three axes in one": [piece((24, 2), "(a b c) d", "t", "(c a) (b d)", {"a": 2, "b": 3})],
}  # fmt: skip

READ_ONLY_CASES: dict[str, list[ParameterPiece]] = {
    "copies of slices": [piece((6, 5, 2), "(n g) m h", "t", "(g h)@2/8 m", {"g": 3})],
    "copies of slices, scaled": [piece((6, 2, 5), "(n g) h m", "t", "m (g h)@2/8", {"g": 3}, 3.0)],
    "the first slice, scaled": [piece((2, 5), "h m", "t", "m h@0/8", factor=0.5)],
}
"""Patterns that are only read, never written."""


def plainly(pieces: list[ParameterPiece], shape: tuple[int, ...], tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Reference: our parameter, element by element, by the definition of patterns."""
    parameter = torch.full(shape, torch.nan)
    for part in pieces:
        lengths = part.parameter_side.lengths
        for places in product(*(range(lengths[axis]) for axis in part.axes)):
            position = dict(zip(part.axes, places, strict=True))
            indices = []
            for side in (part.parameter_side, part.tensor_side):
                index = list(side.first)
                for axis, (dim, step) in side.steps.items():
                    index[dim] += position[axis] * step
                indices.append(tuple(index))
            tensor = tensors[part.tensor_name(position["e"]) if part.is_per_expert else part.name]
            parameter[indices[0]] = part.factor * tensor[indices[1]]
    return parameter


def example(name: str) -> tuple[list[ParameterPiece], dict[str, torch.Tensor], torch.Tensor]:
    pieces = {**CASES, **READ_ONLY_CASES}[name]
    tensors = {tensor_name: torch.randn(case.tensor_side.shape) for case in pieces for tensor_name in case.names()}
    return pieces, tensors, plainly(pieces, pieces[0].parameter_side.shape, tensors)


def rectangle(data: st.DataObject, shape: tuple[int, ...]) -> Slices:
    bounds = []
    for size in shape:
        first = data.draw(st.integers(0, size))
        bounds.append((first, data.draw(st.integers(first, size))))
    return tuple(bounds)


def cut(tensor: torch.Tensor, region: Slices) -> torch.Tensor:
    return tensor[tuple(slice(*bounds) for bounds in region)]


def test_a_pattern_says_where_axes_lie():
    (case,) = CASES["even columns"]
    assert case.tensor_side.shape == (3, 4, 10)
    _, tensors, parameter = example("even columns")
    assert torch.equal(parameter, tensors["t"][:, :, ::2])
    _, tensors, parameter = example("second half")
    assert torch.equal(parameter, tensors["t"][:, 5:].transpose(1, 2))
    _pieces, tensors, parameter = example("one kind after another")
    flat = tensors["t"][:, 0]
    assert torch.equal(parameter[:11], torch.cat([flat[0:3], flat[6:9], flat[12:17]]))
    assert torch.equal(parameter[11:], torch.cat([flat[3:6], flat[9:12], flat[17:22]]))


@pytest.mark.parametrize("name", sorted({**CASES, **READ_ONLY_CASES}))
@given(data=st.data())
def test_any_rectangle_of_ours_is_that_of_the_whole_conversion(name: str, data: st.DataObject):
    pieces, tensors, parameter = example(name)
    region = rectangle(data, tuple(parameter.shape))
    local = torch.full([end - first for first, end in region], torch.nan)
    num_read: dict[str, int] = {}

    def read(tensor_name: str, bounds: Slices) -> torch.Tensor:
        block = cut(tensors[tensor_name], bounds)
        num_read[tensor_name] = num_read.get(tensor_name, 0) + block.numel()
        return block

    fill_parameter(local, [first for first, _ in region], pieces, read, lambda *_: None)
    assert torch.equal(local, cut(parameter, region))
    if name in ("same", "turned", "a tensor an expert", "one kind after another"):
        assert sum(num_read.values()) == local.numel(), "nothing is read that is not wanted"


@pytest.mark.parametrize("name", sorted(CASES))
@given(data=st.data())
def test_any_rectangle_of_theirs_is_that_of_the_tensor(name: str, data: st.DataObject):
    pieces, tensors, parameter = example(name)
    tensor_name = data.draw(st.sampled_from(sorted(tensors)))
    sources = [("ours", part, part.names().index(tensor_name)) for part in pieces]
    region = rectangle(data, tuple(tensors[tensor_name].shape))
    block = torch.full([end - first for first, end in region], torch.nan)
    fill_folder_tensor(block, region, sources, lambda _, bounds, __: cut(parameter, bounds))
    expected = cut(tensors[tensor_name], region)
    is_filled = ~block.isnan()
    assert torch.equal(block[is_filled], expected[is_filled])
    if name not in ("first half", "second half", "even columns"):
        assert bool(is_filled.all())


@pytest.mark.parametrize("name", ["three axes in one", "copies of slices"])
@given(data=st.data())
def test_a_box_is_split_into_parts_of_at_most_so_many_elements(name: str, data: st.DataObject):
    (case,) = {**CASES, **READ_ONLY_CASES}[name]
    box = {axis: (0, length) for axis, length in case.parameter_side.lengths.items()}
    limit = data.draw(st.integers(1, 50))
    parts = list(split(box, case.tensor_side, limit))
    coverage = torch.zeros([case.parameter_side.lengths[axis] for axis in case.axes])
    for part in parts:
        view = coverage[tuple(slice(*part[axis]) for axis in case.axes)]
        view += 1
        assert view.numel() <= limit
    assert bool((coverage == 1).all())


@pytest.mark.parametrize("text", ["a b)", "A b", "(a", "a@3"])
def test_a_pattern_that_says_nothing_is_our_own_mistake(text: str):
    with pytest.raises(AssertionError):
        parse_pattern(text)


def test_patterns_are_of_letters_and_brackets():
    for letter in string.ascii_lowercase:
        assert parse_pattern(letter)[0].terms[0].axis == letter

"""Rotary positions: frequencies against those of transformers, rotations against their definition."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from moe.layers.rotary import Pairing, frequencies, rotary_table, rotate, rotate_reference, yarn_scale
from moe.spec import ProblemCode
from moe.spec.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)
from tests.refusals import expect_problem
from tests.unit.layers.gradients import assert_equal_gradients

PAIRINGS: tuple[Pairing, ...] = ("half", "interleaved")
LENGTHS = st.integers(16, 1 << 17)
FACTORS = st.floats(1, 64)
SCALINGS = st.one_of(
    st.builds(LinearScaling, factor=FACTORS),
    st.builds(DynamicScaling, factor=FACTORS, original_tokens=LENGTHS),
    st.builds(
        Llama3Scaling, factor=FACTORS, original_tokens=LENGTHS, low_frequency_factor=st.floats(0.5, 2),
        high_frequency_factor=st.floats(2.5, 8),
    ),
    st.builds(
        YarnScaling, factor=FACTORS, original_tokens=LENGTHS, beta_fast=st.floats(8, 64), beta_slow=st.floats(0.5, 4),
        truncate=st.booleans(), attention_factor=st.none() | st.floats(0.5, 2),
        mscale=st.none() | st.sampled_from((0.0, 0.707, 1.0)),
        mscale_all_dim=st.none() | st.sampled_from((0.0, 0.5, 1.0)),
    ),
)  # fmt: skip
NAMES = {
    "original_tokens": "original_max_position_embeddings",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "kind": "rope_type",
}


def by_transformers(head_dim: int, rope: RopeSpec, scaling: RopeScaling, length: int | None) -> tuple[Tensor, float]:
    # A namespace: a real model configuration checks and fills in far more than these functions read.
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    fields = {NAMES.get(key, key): value for key, value in scaling.model_dump().items() if value is not None}
    config = SimpleNamespace(
        head_dim=head_dim, hidden_size=head_dim, num_attention_heads=1,
        max_position_embeddings=getattr(scaling, "original_tokens", 0),
        rope_parameters={**fields, "rope_theta": rope.base, "partial_rotary_factor": rope.fraction},
        standardize_rope_params=lambda: None,
    )  # fmt: skip
    return utils.ROPE_INIT_FUNCTIONS[scaling.kind](config, seq_len=length)


@given(
    scaling=SCALINGS, base=st.floats(100, 1e7), head_dim=st.sampled_from((16, 64, 128, 192)),
    fraction=st.sampled_from((0.25, 0.5, 1.0)), length=st.integers(1, 1 << 18),
)  # fmt: skip
@example(YarnScaling(factor=4, original_tokens=64, attention_factor=0.7), 1e4, 64, 1.0, 100)
@example(Llama3Scaling(factor=16, original_tokens=8192, high_frequency_factor=1), 5e5, 128, 1.0, 100)
def test_frequencies_are_those_of_transformers(
    scaling: RopeScaling, base: float, head_dim: int, fraction: float, length: int
) -> None:
    rope = RopeSpec(base=base, fraction=fraction, scaling=scaling)
    reference, reference_factor = by_transformers(head_dim, rope, scaling, length)
    actual, factor = frequencies(rope.rotated_dim(head_dim), rope.base, rope.scaling, torch.tensor([length]))
    assert actual.dtype == torch.float64
    assert factor == pytest.approx(reference_factor, rel=1e-12)
    # The reference computes in float32, and llama3's blend subtracts nearly equal numbers.
    torch.testing.assert_close(actual.reshape(-1).float(), reference.float(), rtol=2e-5, atol=1e-9)


def test_frequencies_without_scaling_and_the_scale_of_latent_attention() -> None:
    rates, factor = frequencies(6, 1000.0)
    torch.testing.assert_close(rates, torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64))
    assert factor == 1.0
    assert yarn_scale(40, 1.0) == pytest.approx(1 + 0.1 * math.log(40))
    assert yarn_scale(1.0, 5.0) == 1.0


@given(
    pairing=st.sampled_from(PAIRINGS), num_pairs=st.integers(1, 4), rest=st.integers(0, 3), by_token=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_outputs_and_gradients_equal_the_reference(
    pairing: Pairing, num_pairs: int, rest: int, by_token: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    x = torch.randn(2, 3, 4, 2 * num_pairs + rest, dtype=torch.float64)
    x = x.transpose(1, 2) if by_token else x
    angles = torch.randn(2, 1, x.shape[2], num_pairs, dtype=torch.float64)
    cos, sin = angles.cos() * 1.5, angles.sin() * 1.5
    rotations = (lambda x: rotate(x, cos, sin, pairing)), (lambda x: rotate_reference(x, cos, sin, pairing))
    assert_equal_gradients(*rotations, x)
    torch.testing.assert_close(rotate(x.float(), cos, sin, pairing), rotate(x, cos, sin, pairing).float())


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_bfloat16_is_rounded_once(pairing: Pairing) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 40, 16).bfloat16()
    cos, sin = rotary_table(torch.arange(40).expand(2, -1), 16, RopeSpec(), dtype=x.dtype)
    assert cos.dtype == torch.float32
    exact = rotate(x.double(), cos.double(), sin.double(), pairing)
    torch.testing.assert_close(rotate(x, cos, sin, pairing), exact.bfloat16(), rtol=2**-8, atol=1e-6)


def test_dynamic_scaling_follows_the_length_of_each_row() -> None:
    rope = RopeSpec(scaling=DynamicScaling(factor=2.0, original_tokens=4))
    short, long = torch.arange(3), torch.arange(9)
    positions = torch.zeros(2, 9, dtype=torch.int64)
    positions[0, :3], positions[1] = short, long
    tables = rotary_table(positions, 8, rope)
    for row, row_positions in enumerate((short, long)):
        for table, batch_table in zip(rotary_table(row_positions[None], 8, rope), tables, strict=True):
            torch.testing.assert_close(batch_table[row : row + 1, :, : row_positions.numel()], table, rtol=0, atol=0)
    last = rotary_table(long[None, -1:], 8, rope)
    first = rotary_table(long[None, :1], 8, rope, num_positions=torch.tensor([9]))
    torch.testing.assert_close(last[0], tables[0][1:, :, -1:])
    assert not torch.equal(first[0], last[0])


@pytest.mark.parametrize("length", [4, 5])
def test_longrope_is_that_of_transformers_with_factors_of_its_own(length: int) -> None:
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    scaling = LongRopeScaling(original_tokens=4, short_factors=(1.0, 1.5, 2.0), long_factors=(2.0, 5.0, 9.0),
                              short_mscale=1.2, long_mscale=1.4)  # fmt: skip
    parameters = {"rope_theta": 100.0, "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 5.0, 9.0], "factor": 2.0,
                  "original_max_position_embeddings": 4}  # fmt: skip
    config = SimpleNamespace(head_dim=6, hidden_size=6, num_attention_heads=1, rope_parameters=parameters,
                             standardize_rope_params=lambda: None)  # fmt: skip
    reference, _ = utils.ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=length)
    actual, factor = frequencies(6, 100.0, scaling, torch.tensor([length, 3]))
    torch.testing.assert_close(actual[0].float(), reference.float())
    torch.testing.assert_close(actual[1], frequencies(6, 100.0, scaling)[0])
    assert factor.flatten().tolist() == [1.4 if length > 4 else 1.2, 1.2]


def test_longrope_follows_the_length_of_each_document() -> None:
    scaling = LongRopeScaling(original_tokens=4, short_factors=(1.0, 1.5), long_factors=(2.0, 5.0), long_mscale=1.4)
    rope = RopeSpec(scaling=scaling)
    positions = torch.tensor([[*range(3), *range(6)], [*range(9)]])
    lengths = torch.tensor([[3] * 3 + [6] * 6, [9] * 9])
    packed = rotary_table(positions, 4, rope, num_positions=lengths)
    for row, place in ((0, slice(0, 3)), (0, slice(3, 9)), (1, slice(0, 9))):
        alone = rotary_table(positions[row : row + 1, place], 4, rope)
        for table, table_alone in zip(packed, alone, strict=True):
            torch.testing.assert_close(table[row : row + 1, :, place], table_alone, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("fields", "code", "path"),
    [
        ({"base": 1.0}, "out_of_range", "base"), ({"fraction": 1.5}, "out_of_range", "fraction"),
        ({"pairing": "thirds"}, "not_a_choice", "pairing"),
        ({"scaling": {"kind": "linear", "factor": 0.5}}, "out_of_range", "scaling.linear.factor"),
        ({"scaling": {"kind": "yarn", "factor": 2.0}}, "missing", "scaling.yarn.original_tokens"),
        ({"scaling": {"kind": "yarn", "factor": 2.0, "original_tokens": 8, "beta_fast": 0.5}}, "out_of_range",
         "scaling.yarn"),
        ({"scaling": {"kind": "llama3", "factor": 2.0, "original_tokens": 8, "low_frequency_factor": 5.0}},
         "out_of_range", "scaling.llama3"),
        ({"scaling": {"kind": "axial", "factor": 2.0}}, "not_a_choice", "scaling.kind"),
        ({"scaling": {"kind": "longrope", "original_tokens": 8, "short_factors": [1.0], "long_factors": [1.0, 2.0]}},
         "mismatch", "scaling.longrope"),
    ],
)  # fmt: skip
def test_invalid_specs_are_refused(fields: dict[str, Any], code: ProblemCode, path: str) -> None:
    with expect_problem(code, path):
        RopeSpec(**fields)


@pytest.mark.parametrize(("head_dim", "fraction", "factor"), [(8, 0.25, None), (10, 0.5, 2.0), (6, 1.0, None)])
def test_a_fraction_in_proportion_is_one_of_the_heads_frequencies(
    head_dim: int, fraction: float, factor: float | None
) -> None:
    rope = RopeSpec(base=100.0, fraction=fraction, proportional=True,
                    scaling=None if factor is None else LinearScaling(factor=factor))  # fmt: skip
    cos, sin = rotary_table(torch.tensor([[3]]), head_dim, rope, dtype=torch.float64)
    pairs = head_dim // 2
    angles = [
        3 * 100.0 ** (-2 * pair / head_dim) / (factor or 1) if pair < int(fraction * pairs) else 0.0
        for pair in range(pairs)
    ]
    expected = torch.tensor(angles, dtype=torch.float64)
    torch.testing.assert_close(cos[0, 0, 0], expected.cos())
    torch.testing.assert_close(sin[0, 0, 0], expected.sin())


def test_heads_that_do_not_turn_in_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"head_dim \(=10\) times fraction \(=0.5\)"):
        RopeSpec(fraction=0.5).rotated_dim(10)
    with pytest.raises(ValueError, match="3 frequencies"):
        RopeSpec(
            scaling=LongRopeScaling(original_tokens=8, short_factors=(1.0, 2.0), long_factors=(1.0, 2.0))
        ).rotated_dim(6)
    with pytest.raises(ValueError, match="dynamic"):
        RopeSpec(scaling=DynamicScaling(factor=2, original_tokens=8)).rotated_dim(2)
    with pytest.raises(ValueError, match=r"head_dim \(=9\)"):
        RopeSpec(proportional=True).rotated_dim(9)

"""Rotary positions: frequencies against those of transformers, rotations against their definition."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe.layers.rotary import Pairing, frequencies, rotary_table, rotate, rotate_reference, yarn_scale
from moe.spec import SpecError
from moe.spec.rope import DynamicScaling, LinearScaling, Llama3Scaling, RopeScaling, RopeSpec, YarnScaling
from tests.unit.layers.gradients import outputs_and_gradients

PAIRINGS: tuple[Pairing, ...] = ("half", "interleaved")
LENGTHS = st.integers(16, 1 << 17)
FACTORS = st.floats(1, 64)
SCALINGS = st.one_of(
    st.builds(LinearScaling, factor=FACTORS),
    st.builds(DynamicScaling, factor=FACTORS, original_tokens=LENGTHS),
    st.builds(
        Llama3Scaling,
        factor=FACTORS,
        original_tokens=LENGTHS,
        low_frequency_factor=st.floats(0.5, 2),
        high_frequency_factor=st.floats(2.5, 8),
    ),
    st.builds(
        YarnScaling,
        factor=FACTORS,
        original_tokens=LENGTHS,
        beta_fast=st.floats(8, 64),
        beta_slow=st.floats(0.5, 4),
        truncate=st.booleans(),
        attention_factor=st.none() | st.floats(0.5, 2),
        mscale=st.none() | st.sampled_from((0.0, 0.707, 1.0)),
        mscale_all_dim=st.none() | st.sampled_from((0.0, 0.5, 1.0)),
    ),
)
NAMES = {
    "original_tokens": "original_max_position_embeddings",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "kind": "rope_type",
}


def of_transformers(head_dim: int, rope: RopeSpec, scaling: RopeScaling, length: int | None) -> tuple[Tensor, float]:
    # A namespace, as a model's own configuration checks and fills in far more than these functions read.
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    written: dict[str, Any] = {
        NAMES.get(key, key): each for key, each in scaling.model_dump().items() if each is not None
    }
    config = SimpleNamespace(
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=getattr(scaling, "original_tokens", 0),
        rope_parameters={**written, "rope_theta": rope.base, "partial_rotary_factor": rope.fraction},
        standardize_rope_params=lambda: None,
    )
    return utils.ROPE_INIT_FUNCTIONS[scaling.kind](config, seq_len=length)


@given(
    scaling=SCALINGS,
    base=st.floats(100, 1e7),
    head_dim=st.sampled_from((16, 64, 128, 192)),
    fraction=st.sampled_from((0.25, 0.5, 1.0)),
    length=st.integers(1, 1 << 18),
)
def test_frequencies_are_those_of_transformers(
    scaling: RopeScaling, base: float, head_dim: int, fraction: float, length: int
) -> None:
    rope = RopeSpec(base=base, fraction=fraction, scaling=scaling)
    theirs, their_factor = of_transformers(head_dim, rope, scaling, length)
    ours, factor = frequencies(rope.rotated_dim(head_dim), rope.base, rope.scaling, torch.tensor([length]))
    assert ours.dtype == torch.float64
    assert factor == pytest.approx(their_factor, rel=1e-12)
    # They compute in float32, and llama3's blend subtracts what is nearly alike.
    torch.testing.assert_close(ours.reshape(-1).float(), theirs.float(), rtol=2e-5, atol=1e-9)


def test_without_scaling() -> None:
    rates, factor = frequencies(6, 1000.0)
    torch.testing.assert_close(rates, torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64))
    assert factor == 1.0


def test_the_scale_of_latent_attention() -> None:
    assert yarn_scale(40, 1.0) == pytest.approx(1 + 0.1 * math.log(40))
    assert yarn_scale(1.0, 5.0) == 1.0


def by_hand(x: Tensor, positions: Tensor, rates: Tensor, factor: float, pairing: Pairing) -> Tensor:
    """Each pair by itself; `x` `[B, n, L, d]`."""
    turned, num_pairs = x.clone(), rates.numel()
    for row in range(x.shape[0]):
        for token in range(x.shape[2]):
            for pair in range(num_pairs):
                one, other = (pair, pair + num_pairs) if pairing == "half" else (2 * pair, 2 * pair + 1)
                angle = float(positions[row, token]) * float(rates[pair])
                cos, sin = factor * math.cos(angle), factor * math.sin(angle)
                first, second = x[row, :, token, one], x[row, :, token, other]
                turned[row, :, token, one] = first * cos - second * sin
                turned[row, :, token, other] = second * cos + first * sin
    return turned


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_pairs_turn_by_their_angles(pairing: Pairing, fraction: float) -> None:
    torch.manual_seed(0)
    rope = RopeSpec(fraction=fraction, pairing=pairing, scaling=YarnScaling(factor=4, original_tokens=8))
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 0, 1], [7, 8, 9, 10, 11]])
    cos, sin = rotary_table(positions, 8, rope, dtype=x.dtype)
    expected = by_hand(x, positions, *frequencies(rope.rotated_dim(8), rope.base, rope.scaling), pairing)
    torch.testing.assert_close(rotate(x, cos, sin, pairing), expected, rtol=1e-12, atol=1e-12)


@given(
    pairing=st.sampled_from(PAIRINGS),
    num_pairs=st.integers(1, 4),
    rest=st.integers(0, 3),
    by_token=st.booleans(),
    seed=st.integers(0, 99),
)
def test_outputs_and_gradients_are_the_reference_s(
    pairing: Pairing, num_pairs: int, rest: int, by_token: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    x = torch.randn(2, 3, 4, 2 * num_pairs + rest, dtype=torch.float64)
    x = x.transpose(1, 2) if by_token else x
    angles = torch.randn(2, 1, x.shape[2], num_pairs, dtype=torch.float64)
    cos, sin = angles.cos() * 1.5, angles.sin() * 1.5
    made = outputs_and_gradients(lambda x: rotate(x, cos, sin, pairing), x)
    expected = outputs_and_gradients(lambda x: rotate_reference(x, cos, sin, pairing), x)
    torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(rotate(x.float(), cos, sin, pairing), made[0].float())


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_bfloat16_is_rounded_once(pairing: Pairing) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 40, 16).bfloat16()
    cos, sin = rotary_table(torch.arange(40).expand(2, -1), 16, RopeSpec(), dtype=x.dtype)
    assert cos.dtype == torch.float32
    exact = rotate(x.double(), cos.double(), sin.double(), pairing)
    torch.testing.assert_close(rotate(x, cos, sin, pairing), exact.bfloat16(), rtol=2**-8, atol=1e-6)


def test_scores_depend_on_distances_alone() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 1, 6, 8, dtype=torch.float64)
    near, far = (
        rotate(x, *rotary_table(torch.arange(start, start + 6)[None], 8, RopeSpec(), dtype=x.dtype))
        for start in (0, 1000)
    )
    torch.testing.assert_close(near @ near.transpose(-1, -2), far @ far.transpose(-1, -2))


def test_dynamic_scaling_is_each_row_s_own() -> None:
    rope = RopeSpec(scaling=DynamicScaling(factor=2.0, original_tokens=4))
    short, long = torch.arange(3), torch.arange(9)
    both = torch.zeros(2, 9, dtype=torch.int64)
    both[0, :3], both[1] = short, long
    together = rotary_table(both, 8, rope)
    for row, alone in enumerate((short, long)):
        for table, of_both in zip(rotary_table(alone[None], 8, rope), together, strict=True):
            torch.testing.assert_close(of_both[row : row + 1, :, : alone.numel()], table, rtol=0, atol=0)
    last = rotary_table(long[None, -1:], 8, rope)
    known = rotary_table(long[None, :1], 8, rope, num_positions=torch.tensor([9]))
    torch.testing.assert_close(last[0], together[0][1:, :, -1:])
    assert not torch.equal(known[0], last[0])


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"base": 1.0}, "base"),
        ({"fraction": 1.5}, "fraction"),
        ({"pairing": "thirds"}, "pairing"),
        ({"scaling": {"kind": "linear", "factor": 0.5}}, "factor"),
        ({"scaling": {"kind": "yarn", "factor": 2.0}}, "original_tokens"),
        ({"scaling": {"kind": "yarn", "factor": 2.0, "original_tokens": 8, "beta_fast": 0.5}}, "beta_fast"),
        ({"scaling": {"kind": "llama3", "factor": 2.0, "original_tokens": 8, "low_frequency_factor": 4.0}},
         "low_frequency_factor"),
        ({"scaling": {"kind": "longrope", "factor": 2.0}}, "scaling"),
    ],
)  # fmt: skip
def test_mistakes_are_named(fields: dict[str, Any], place: str) -> None:
    with pytest.raises(SpecError, match=place):
        RopeSpec(**fields)


def test_a_head_that_does_not_turn_in_pairs() -> None:
    with pytest.raises(ValueError, match=r"head_dim \(=10\) times fraction \(=0.5\)"):
        RopeSpec(fraction=0.5).rotated_dim(10)
    with pytest.raises(ValueError, match="dynamic"):
        RopeSpec(scaling=DynamicScaling(factor=2, original_tokens=8)).rotated_dim(2)


def test_a_spec_is_what_its_json_says() -> None:
    rope = RopeSpec(base=5e5, scaling=Llama3Scaling(factor=8, original_tokens=8192))
    assert RopeSpec.model_validate_json(rope.model_dump_json()) == rope

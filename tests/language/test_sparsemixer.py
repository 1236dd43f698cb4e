"""SparseMixer against transformers' function and model of Phi-3.5-MoE, with the same random numbers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from moe.interchange import load_weights
from moe.random import Purpose, fold, gumbel, uniform
from moe.routing import RoutingState, TokenContext, route
from moe.spec import MoESpec
from moe.tasks.batch_context import BatchContext
from moe.tasks.language import build_model
from tests.interchange.tiny import LONG_ROPE
from tests.language.families import FAMILIES
from tests.language.model_pairs import as_double, model_pair
from tests.language.test_families import assert_close, assert_gradients_equal, loss_of, tokens_of

STEP, SEED = 3, 11


def spec_of(num_experts: int, **fields: object) -> MoESpec:
    return MoESpec(router="sparsemixer", num_experts=num_experts, model_dim=2, hidden_dim=2, **fields)


@contextmanager
def our_draws(ids: Tensor, num_experts: int, layers: Sequence[int]) -> Iterator[None]:
    """Let transformers draw our numbers for tokens `ids` int64 `[T]`, in the order of its calls."""
    keys = [fold(fold(SEED, STEP, layer), purpose, choice)
            for layer in layers for choice in range(2) for purpose in (Purpose.GUMBEL, Purpose.HEUN_STEP)]  # fmt: skip
    exponentials = ((-gumbel(key, ids, num_experts)).exp() for key in keys[::2])
    uniforms = (uniform(key, ids)[:, None] for key in keys[1::2])
    with (
        patch.object(Tensor, "exponential_", lambda self: self.copy_(next(exponentials))),
        patch.object(torch, "rand_like", lambda like: next(uniforms)),
        patch.object(Tensor, "uniform_", lambda self: self),
    ):
        yield
    assert not list(exponentials), "every number is drawn"
    assert not list(uniforms)


def logits_of(seed: int, num_experts: int, scale: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(1, 40, num_experts, generator=generator, dtype=torch.float64)


@given(
    st.integers(0, 999), st.integers(2, 9), st.sampled_from([0.1, 3.0]), st.sampled_from([0.0, 0.01, 0.4, 3.0]),
    st.sampled_from(["sampled", "highest", "evaluation"]),
)  # fmt: skip
def test_choices_weights_and_gradients(seed: int, num_experts: int, scale: float, noise: float, mode: str) -> None:
    ours = logits_of(seed, num_experts, scale).requires_grad_()
    theirs = ours.detach()[0].clone().requires_grad_()
    with as_double(), our_draws(torch.arange(40), num_experts, [4] if mode == "sampled" else []):
        their_weight, their_expert = sparsemixer(theirs, noise, mode == "sampled")
    choice = "highest" if mode == "highest" else "sampled"
    tokens = TokenContext(step=STEP, seed=SEED, training=mode != "evaluation")
    routing = route(ours, spec_of(num_experts, jitter_noise=noise, training_choice=choice), tokens, layer=4)
    assert torch.equal(routing.expert, their_expert)
    torch.testing.assert_close(routing.weight, their_weight, rtol=1e-12, atol=1e-12)
    factors = torch.randn(their_weight.shape, dtype=torch.float64)
    (routing.weight * factors).sum().backward()
    (their_weight * factors).sum().backward()
    torch.testing.assert_close(ours.grad[0], theirs.grad, rtol=1e-12, atol=1e-12)


def test_sampling_follows_the_probabilities_and_draws_for_each_choice() -> None:
    """Over many tokens, first choices have the frequencies of a softmax over the candidates, and midpoints a quarter
    of the tokens whose choice is not the most probable."""
    logits = torch.tensor([2.0, 1.5, 1.0, -9.0], dtype=torch.float64).expand(1, 40_000, 4)
    routing = route(logits, spec_of(4, jitter_noise=0.3), TokenContext(seed=SEED))
    probs = torch.tensor([2.0, 1.5, 1.0], dtype=torch.float64).softmax(0)
    first, weight = routing.expert[:, 0], routing.weight[:, 0]
    frequencies = torch.bincount(first, minlength=4) / len(first)
    torch.testing.assert_close(frequencies[:3].double(), probs, rtol=0, atol=0.01)
    assert not frequencies[3]
    is_other = first != 0
    assert torch.equal(weight[~is_other], probs[0].expand(int((~is_other).sum())))
    share = (weight[is_other] == probs[first[is_other]]).double().mean()
    assert share == pytest.approx(0.25, abs=0.02)


def test_a_replayed_expert_has_a_weight_whatever_its_logit() -> None:
    logits = torch.tensor([[[5.0, 4.5, -3.0, 0.0]]], dtype=torch.float64)
    replayed = torch.tensor([[[2, -1]]])
    routing = route(logits, spec_of(4, training_choice="highest"), state=RoutingState(replayed=replayed))
    assert routing.expert.tolist() == [[2, 0]]
    torch.testing.assert_close(
        routing.weight[0, 0], torch.softmax(torch.tensor([5.0, -3.0], dtype=torch.float64), 0)[1]
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_a_training_step_equals_that_of_transformers(tmp_path: Path, seed: int) -> None:
    """Loss and every gradient of the model in training, which samples."""
    config = {**FAMILIES["phimoe"](Random(seed)), "num_hidden_layers": 2, "router_jitter_noise": 0.4}
    pair = model_pair(config, tmp_path / "theirs", seed)
    spec = pair.spec.model_copy(update={"moe": MoESpec(**{**pair.spec.moe.model_dump(), "training_choice": "sampled"})})
    model = build_model(spec, dtype=torch.float64)
    load_weights(str(pair.folder), model, spec)
    tokens = tokens_of(Random(seed), spec.vocab_size, 3, 9)
    with as_double(), our_draws(torch.arange(tokens.numel()), spec.moe.num_experts, range(2)):
        expected = pair.reference.train()(input_ids=tokens, use_cache=False).logits
        loss_of(expected, tokens).backward()
    logits = model(tokens, BatchContext(step=STEP, seed=SEED, training=True))
    assert_close(logits, expected)
    assert not torch.allclose(logits, model(tokens, BatchContext(step=STEP + 1, seed=SEED, training=True)))
    loss_of(logits, tokens).backward()
    assert_gradients_equal(type(pair)(pair.reference, model, spec, pair.folder), tmp_path)


def test_decoding_has_the_angles_of_the_length_that_a_row_may_reach(tmp_path: Path) -> None:
    """Rows of a batch have the logits of each alone, and of one pass over a text of that length."""
    config = {**FAMILIES["phimoe"](Random(0)), "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 12,
              "head_dim": 6, "sliding_window": None, "rope_parameters": LONG_ROPE}  # fmt: skip
    pair = model_pair(config, tmp_path / "theirs")
    model = pair.model.eval()
    for length in (32, 33):  # the longest of the short factors, and the shortest of the long ones
        tokens = tokens_of(Random(0), pair.spec.vocab_size, 1, length)
        expected = model(tokens)
        state = model.start(1, length)
        steps = [
            model.extend(tokens[:, :20], state),
            *(model.extend(tokens[:, i : i + 1], state) for i in range(20, length)),
        ]
        assert_close(torch.stack(steps, 1), expected[:, 19:])
    padding = torch.tensor([[True] * 3 + [False] * 17])
    state = model.start(1, 36)
    step = model.extend(torch.cat((tokens[:, :3], tokens[:, :17]), 1), state, padding)
    alone = model.start(1, 33)
    assert_close(step, model.extend(tokens[:, :17], alone))

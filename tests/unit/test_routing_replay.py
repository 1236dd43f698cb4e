"""Recording and replaying of routing: equal outputs and gradients, for any part of the batch and in any layer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from moe.layers import MoELayer, TokenContext
from moe.routing import RoutingState, merge_recordings, record_routing, replay_routing, route
from moe.sharding.capture.capture import capture
from moe.spec import MoESpec
from tests.reference_routing import softmax

ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {"router": "softmax_topk", "capacity_factor": 0.8, "drop_by": "probability"},
    "softmax with a bias, in groups": {
        "router": "softmax_topk", "selection_bias": True, "num_expert_groups": 2, "routed_scaling_factor": 1.5,
    },
    "sigmoid": {"router": "sigmoid_topk", "aux_coefficient": 0.1, "aux_scope": "sequence"},
    "switch": {"router": "switch_top1", "input_jitter": 0.2},
    "gshard": {"capacity_factor": 1.0, "min_capacity": 1},
    "gshard, sampling": {"second_expert": "sampling", "normalize_gates": "after_drop"},
    "gshard, rejected ones take slots": {"rejected_second_takes_slot": True, "capacity_factor": 1.0},
    "sinkhorn": {"router": "sinkhorn_topk"},
    "sparsemixer": {"router": "sparsemixer", "jitter_noise": 0.3},
}  # fmt: skip


class Model(nn.Module):
    """Two MoE layers, each in a residual."""

    def __init__(self, num_experts: int = 4, **fields: Any) -> None:
        super().__init__()
        spec = MoESpec(num_experts=num_experts, model_dim=6, hidden_dim=10, group_tokens=8, **fields)
        self.first, self.last = (MoELayer(spec, layer=number, dtype=torch.float64) for number in (1, 4))
        for buffer in self.buffers():
            buffer.copy_(torch.randn(buffer.shape) / 8)

    def forward(self, x: Tensor, tokens: TokenContext | None = None) -> Tensor:
        for layer in (self.first, self.last):
            x = x + layer(x, tokens)[0]
        return x


def tokens_of(num_tokens: int = 32, **fields: Any) -> TokenContext:
    ids = torch.arange(num_tokens).view(-1, 8)
    return TokenContext(ids, ids % 7 == 5, step=3, sequence_tokens=4, **fields)


def output_and_gradients(model: Model, x: Tensor, tokens: TokenContext) -> list[Tensor]:
    """The output and every gradient."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x, tokens)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("router", ROUTERS)
def test_the_same_pass_replayed_is_the_same_in_every_bit(router: str) -> None:
    torch.manual_seed(0)
    model, x = Model(**ROUTERS[router]), torch.randn(4, 8, 6).double()
    with record_routing(model) as recording:
        expected = output_and_gradients(model, x, tokens_of())
    before = [layer.route for layer in (model.first, model.last)]
    with replay_routing(model, recording):
        replay = output_and_gradients(model, x, tokens_of())
    assert all(torch.equal(tensor, reference) for tensor, reference in zip(replay, expected, strict=True))
    assert list(recording) == [1, 4]
    assert recording[1].dtype == torch.int64
    assert torch.equal((recording[4] < 0).all(1), torch.arange(32) % 7 == 5), "padding has no choices"
    assert [layer.route for layer in (model.first, model.last)] == before


@pytest.mark.parametrize("router", ROUTERS)
def test_experts_are_the_recorded_ones_whatever_the_router_would_choose(router: str) -> None:
    """Weights and gradients follow the current router."""
    torch.manual_seed(0)
    model, x = Model(**{**ROUTERS[router], "capacity_factor": None}), torch.randn(4, 8, 6).double()
    with torch.no_grad(), record_routing(model) as recording:
        model(x, tokens_of())
    redraw_routers(model)
    with torch.no_grad(), record_routing(model) as new_recording:
        model(x, tokens_of())
    assert not torch.equal(new_recording[1], recording[1])
    with record_routing(model) as replay, replay_routing(model, recording):
        y = model(x, tokens_of())
    assert torch.equal(replay.stack(), recording.stack())
    y.sum().backward()
    assert model.first.router.grad.abs().max() > 0


@torch.no_grad()
def redraw_routers(model: Model) -> None:
    for layer in (model.first, model.last):
        layer.router.copy_(torch.randn(6, 4))


def test_any_part_of_the_batch_is_replayed_by_its_positions(tmp_path: Path) -> None:
    """Micro-batches in any order, from a file, and merged recordings."""
    torch.manual_seed(0)
    model, x = Model(router="softmax_topk", top_k=2), torch.randn(4, 8, 6).double()
    ids, padding = tokens_of().ids, tokens_of().padding

    def part(rows: slice) -> TokenContext:
        return TokenContext(ids[rows], padding[rows], step=3)

    parts = []
    for rows in (slice(2, 4), slice(0, 2)):
        with record_routing(model) as recording:
            model(x[rows], part(rows))
        parts.append(recording)
    with record_routing(model) as full:
        for rows in (slice(0, 1), slice(1, 4)):
            model(x[rows], part(rows))
    union = merge_recordings(*parts)
    assert all(torch.equal(union[layer], full[layer]) for layer in (1, 4))
    save_file({"experts": full.stack().to(torch.int16)}, tmp_path / "routing.safetensors")
    from_file = load_file(tmp_path / "routing.safetensors")["experts"]
    assert from_file.shape == (2, 32, 2)
    for source in (from_file, union):
        redraw_routers(model)
        with replay_routing(model, source), record_routing(model) as replay:
            model(x[1:3], part(slice(1, 3)))
        assert torch.equal(replay[4][8:24], full[4][8:24])


def test_generation_a_position_at_a_time_is_replayed_in_one_pass() -> None:
    torch.manual_seed(0)
    model, x = Model(router="softmax_topk", top_k=2), torch.randn(3, 8, 6).double()
    ids = torch.arange(24).view(3, 8)
    with torch.no_grad(), record_routing(model) as recording:
        steps = [
            model(x[:, position : position + 1], TokenContext(ids[:, position : position + 1], training=False))
            for position in range(8)
        ]
    with replay_routing(model, recording.stack()):
        torch.testing.assert_close(model(x, TokenContext(ids)), torch.cat(steps, 1))


def test_a_token_without_a_row_chooses_itself() -> None:
    torch.manual_seed(0)
    model, x = Model(router="sigmoid_topk"), torch.randn(16, 6).double()
    with record_routing(model) as recording:
        model(x)
    replacement = {layer: rows.clone() for layer, rows in recording.items()}
    replacement[1][3:] = -1
    replacement[1][:3] = (recording[1][:3] + 1) % 4
    with replay_routing(model, replacement), record_routing(model) as replay:
        model(x)
    assert torch.equal(replay[1], torch.where(replacement[1] >= 0, replacement[1], recording[1]))


@given(st.integers(0, 2**31), st.integers(1, 4), st.booleans())
def test_weights_are_of_the_logits_for_the_replayed_experts(seed: int, top_k: int, renormalize: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64)
    expert = torch.rand(2, 5, 4, generator=generator).argsort(-1)[..., :top_k]
    spec = MoESpec(router="softmax_topk", num_experts=4, model_dim=2, hidden_dim=2, top_k=top_k,
                   renormalize_gates=renormalize)  # fmt: skip
    routing = route(logits, spec, state=RoutingState(replayed=expert))
    assert torch.equal(routing.expert, expert.view(10, top_k))
    for row, experts, weight in zip(
        logits.view(10, 4).tolist(), routing.expert.tolist(), routing.weight.tolist(), strict=True
    ):
        probs = softmax(row)
        total = sum(probs[e] for e in experts) if renormalize else 1.0
        assert weight == pytest.approx([probs[e] / total for e in experts])


def test_what_cannot_be_recorded_or_replayed_is_refused() -> None:
    torch.manual_seed(0)
    model, x = Model(router="softmax_topk", top_k=2), torch.randn(16, 6).double()
    with record_routing(model) as recording:
        model(x)
    good = dict(recording)
    cases: list[tuple[Any, str]] = [
        (recording.stack()[:1], r"recording \(1, 16, 2\) must be \[2 layers, T, K\]"),
        (recording[1], r"recording \(16, 2\) must be \[2 layers, T, K\]"),
        ({1: recording[1]}, r"recording \(of the layers \[1\]\) must have .* those of \[4\] are missing; record"),
        ({**good, 4: recording[4][:, :1]}, r"recording\[4\] \(16, 1\) must be \[positions, 2 experts per position\]"),
        ({**good, 1: recording[1].double()}, r"recording\[1\] \(=torch.float64\) must be .* whole numbers; convert"),
        ({**good, 1: recording[1] + 4}, r"recording\[1\] \(has \d\) must have expert numbers below 4"),
        ({**good, 1: recording[1] * 0}, r"recording\[1\]\[0\] \(=\[0, 0\]\) must be different experts"),
        ({**good, 1: recording[1].clamp(max=0) - recording[1].clamp(max=1)}, r"recording\[1\]\[\d+\] .* all -1"),
    ]
    for invalid, message in cases:
        with pytest.raises(ValueError, match=message), replay_routing(model, invalid):
            pass
    choice = MoESpec(router="expert_choice", num_experts=4, model_dim=6, hidden_dim=2)
    contexts: list[tuple[Any, Any, Any]] = [
        (replay_routing(model, {layer: rows[:9] for layer, rows in good.items()}), lambda: model(x),
         r"tokens.ids \(has 9\) must be below 9, .* recording\[1\]; record"),
        (replay_routing(nn.Linear(2, 2), good), dict, "must have MoE layers for its routing to be replayed"),
        (record_routing(model), dict, "must run an MoE layer for its routing to be recorded"),
        (replay_routing(model, good), dict, "must run an MoE layer for its routing to be replayed"),
        (record_routing(MoELayer(choice)), dict, r"router \(=expert_choice, of layer 0\) must let tokens choose"),
        (replay_routing(MoELayer(choice), good), dict, r"router \(=expert_choice, of layer 0\) must let tokens choose"),
        (record_routing(model), lambda: capture(model, (x,)), "cannot be captured while its routing is recorded"),
    ]  # fmt: skip
    for watch, act, message in contexts:
        with pytest.raises(ValueError, match=message), watch:
            act()
    with record_routing(model) as twice:
        model(x)
        model(-x)
    with pytest.raises(ValueError, match=r"position \d+ \(in layer 1\) must choose the same experts each time"):
        twice[1]
    spec = model.first.spec
    logits = torch.randn(1, 5, 4)
    for choices, message in (
        (torch.zeros(1, 5, 3, dtype=torch.int64), r"state.replayed \(1, 5, 3\) must be \(1, 5, 2\)"),
        (torch.zeros(1, 5, 2), r"state.replayed \(=torch.float32\) must be a dense tensor of torch.int64"),
        (torch.full((1, 5, 2), 4), r"state.replayed \(has 4\) must have expert numbers below 4"),
    ):
        with pytest.raises(ValueError, match=message):
            route(logits, spec, state=RoutingState(replayed=choices))
    choices = torch.zeros(1, 5, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"router \(=expert_choice\) must let tokens choose experts"):
        route(logits, choice, state=RoutingState(replayed=choices))

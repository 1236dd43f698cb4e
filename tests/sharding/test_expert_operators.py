"""Expert layers under random assignments compute what one device computes: every router, also dropped tokens and
auxiliary losses."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from dataclasses import field as dataclass_field
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.translation_loss import TranslationLoss
from moe.layers import MoELayer, TokenContext
from moe.routing import Routing
from moe.sharding.bindings import experts as operator
from moe.sharding.bindings.experts import EXPERTS
from moe.sharding.bindings.routing import ROUTE
from moe.sharding.capture.capture import capture
from moe.sharding.rules.differentiable import backward, begin_forward_kept, forward_kept, gradients_of_kept
from moe.sharding.rules.registry import rule_of
from moe.sharding.rules.rule import AxisOption
from moe.spec import MoESpec, TranslationModelSpec
from tests.sharding.partitioned import (
    check_at_random,
    differences,
    operators,
    program_of,
    random_assignment,
    run_program,
)
from tests.sharding.test_our_models import translation
from tests.sharding.thread_mesh import ThreadMesh, on_threads

SIZES = {"model_dim": 6, "hidden_dim": 5, "group_tokens": 8}
ROUTERS: dict[str, dict[str, Any]] = {
    "gshard": {"num_experts": 4, "capacity_factor": 1.0, "min_capacity": 1},
    "gshard, uneven, normalised after drops": {
        "num_experts": 5, "capacity_factor": 1.0, "min_capacity": 1, "normalize_gates": "after_drop",
        "rejected_second_takes_slot": True,
    },
    "softmax, gated, biased, shared": {
        "num_experts": 5, "router": "softmax_topk", "top_k": 3, "expert_bias": True, "activation": "geglu",
        "z_coefficient": 0.1, "shared_hidden_dim": 4, "aux_scope": "sequence",
    },
    "softmax of the global batch": {"num_experts": 4, "router": "softmax_topk", "aux_scope": "global_batch"},
    "sigmoid with a bias": {
        "num_experts": 4, "router": "sigmoid_topk", "capacity_factor": 1.0, "drop_by": "probability",
        "activation": "relu2", "latent_dim": 3, "renormalize_eps": 0.1,
    },
    "softmax with a bias in groups, clamped, logits with a bias": {
        "num_experts": 4, "router": "softmax_topk", "selection_bias": True, "num_expert_groups": 2,
        "routed_scaling_factor": 1.5, "logit_bias": True, "activation": "swiglu_clamped", "activation_limit": 0.5,
        "expert_bias": True, "shared_hidden_dim": 4,
    },
    "expert choice": {"num_experts": 4, "router": "expert_choice", "capacity_factor": 1.5},
    "sinkhorn": {"num_experts": 4, "router": "sinkhorn_topk"},
    "sparsemixer": {"num_experts": 4, "router": "sparsemixer", "jitter_noise": 0.5},
    "gates on inputs": {
        "num_experts": 4, "router": "sigmoid_topk", "top_k": 2, "renormalize_gates": False, "bias_update_rate": 0.0,
        "activation": "swiglu", "capacity_factor": 0.9, "apply_gates_to": "inputs",
    },
    "norms of branches and of the router, factors of experts": {
        "num_experts": 4, "router": "softmax_topk", "top_k": 2, "activation": "geglu_tanh", "shared_hidden_dim": 4,
        "router_norm": True, "expert_scale": True, "branch_norms": True,
    },
    "switch with jitter": {"num_experts": 4, "router": "switch_top1", "input_jitter": 0.1, "capacity_factor": 1.0},
}  # fmt: skip


class Layer(nn.Module):
    """A scaled input and an MoE layer, with its routing among the results."""

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6).double())
        self.moe = MoELayer(MoESpec(**SIZES, **fields), layer=1, dtype=torch.float64)
        experts = self.moe.experts
        for bias in (experts.b_in, experts.b_gate, experts.b_out, self.moe.logit_bias):
            if bias is not None:
                nn.init.normal_(bias)
        if self.moe.expert_scale is not None:
            nn.init.normal_(self.moe.expert_scale)
        for buffer in self.moe.buffers():
            buffer.copy_(torch.randn(buffer.shape) if buffer.is_floating_point() else torch.arange(4))

    def forward(self, x: Tensor, ids: Tensor, padding: Tensor, step: Tensor) -> tuple[Tensor, ...]:
        tokens = TokenContext(ids, padding, step=step, seed=3, sequence_tokens=4)
        y, routing = self.moe(x * self.scale, tokens)
        facts = routing.load, routing.chosen, routing.dropped, routing.rejected, routing.entropy
        return (y.pow(2).sum(), routing.aux_loss, routing.z_loss, *facts)


def sample(num_groups: int = 4) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(num_groups)
    padding = torch.zeros(num_groups, 8, dtype=torch.bool)
    padding[-1, 5:] = True
    x = torch.randn(num_groups, 8, 6, generator=generator).double()
    return x, torch.arange(8 * num_groups).view(num_groups, 8), padding, torch.tensor(2)


def exchanges(option: AxisOption) -> bool:
    return option.exchange is not None and option.exchange.kind == "all_to_all"


@pytest.mark.sample(1)
@pytest.mark.parametrize("router", ROUTERS)
def test_any_split(router):
    torch.manual_seed(0)
    check_at_random(Layer(ROUTERS[router]), sample(), cases=4)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "num_groups", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.grid)]
)
@pytest.mark.parametrize("router", ROUTERS)
def test_tokens_and_experts_along_one_axis(router, num_groups):
    torch.manual_seed(1)
    check_at_random(Layer(ROUTERS[router]), sample(num_groups), cases=3, seed=num_groups, prefer=exchanges)


@pytest.mark.sample(1)
@pytest.mark.parametrize("router", ROUTERS)
def test_rows_in_chunks(router: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(operator, "CHUNK_ROWS", 1)
    torch.manual_seed(1)
    check_at_random(Layer(ROUTERS[router]), sample(), cases=2, seed=4, prefer=exchanges)


@dataclass(frozen=True)
class RecordingMesh(ThreadMesh):
    events: list[str] = dataclass_field(default_factory=list)
    """`begin N` and `wait N` of all-to-alls, and `product`."""

    def begin_all_to_all(
        self, rows: Tensor, axis: int, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Callable[[], Tensor]:
        number = sum(event.startswith("begin") for event in self.events)
        self.events.append(f"begin {number}")
        received_rows = self.all_to_all(rows, axis, send_counts, receive_counts)

        def wait() -> Tensor:
            self.events.append(f"wait {number}")
            return received_rows

        return wait


class Products(TorchDispatchMode):
    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self._events.append("product")
        return func(*args, **(kwargs or {}))


def test_one_chunk_is_exchanged_while_experts_compute_the_other():
    """This holds in both passes of a layer with enough rows for two chunks."""
    tokens, width = 2 * operator.CHUNK_ROWS, 4
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, width, generator=generator)
    expert = torch.randint(0, 2, (tokens, 1), generator=generator)

    def events_of(mesh: ThreadMesh) -> tuple[list[str], list[str]]:
        recording = RecordingMesh(**vars(mesh))
        of_all = (2, (), (), 0)
        routing = (expert, torch.ones(tokens, 1), torch.ones(tokens, 1, dtype=torch.bool))
        weights = (torch.ones(1, width, 8), torch.ones(1, 8, width), None, None, None, None)
        with Products(recording.events):
            (y,), saved_values = forward_kept(recording, EXPERTS.name, of_all, x, *routing, *weights, "relu", [])
            forward, count = list(recording.events), len(recording.events)
            gradients_of_kept(saved_values, [torch.ones_like(y)])
        return forward, recording.events[count:]

    for passes in on_threads((2,), events_of):
        for events in passes:
            begins = [event for event in events if event.startswith("begin")]
            assert len(begins) == 4
            for begin in (begins[1], begins[2]):  # the second chunk's rows, and results of the first
                wait = events.index(begin.replace("begin", "wait"))
                assert "product" in events[events.index(begin) : wait], events


def test_a_layer_alone_returns_its_routing():
    torch.manual_seed(0)
    layer, x = (MoELayer(MoESpec(**SIZES, num_experts=4, capacity_factor=1.0), dtype=torch.float64), sample()[0])
    captured_graph = capture(layer, (x,))
    program = program_of(captured_graph, random_assignment(captured_graph, (2,), random.Random(0), exchanges))
    y, routing = layer(x)

    def run_rank(mesh: ThreadMesh) -> tuple[Tensor, Routing]:
        tensors = iter(run_program(program, layer, (x,), mesh)[0])
        values = [next(tensors) if isinstance(output, fx.Node) else output for output in captured_graph.outputs]
        return pytree.tree_unflatten(values, captured_graph.output_tree)

    for output, rank_routing in on_threads((2,), run_rank):
        torch.testing.assert_close(output, y.detach())
        for field in fields(Routing):
            if field.name != "choices":
                actual, expected = (getattr(result, field.name) for result in (rank_routing, routing.detach()))
                torch.testing.assert_close(actual, expected, check_dtype=False, msg=field.name)
        assert torch.equal(rank_routing.load, routing.load)


def test_the_same_program_at_another_step():
    torch.manual_seed(0)
    layer, (*inputs, _) = Layer(ROUTERS["gshard"]), sample()
    captured_graph = capture(layer, sample())
    assignment = random_assignment(captured_graph, (2,), random.Random(0), exchanges)
    losses = []
    for step in range(3):
        arguments = (*inputs, torch.tensor(step))
        assert not differences(layer, arguments, captured_graph, assignment)
        losses.append(layer(*arguments)[0].item())
    assert len(set(losses)) == 3


@pytest.mark.parametrize("alike", [True, False])
def test_gradients_reuse_stored_values_if_both_passes_have_one_option(alike):
    torch.manual_seed(0)
    captured_graph = capture(Layer(ROUTERS["gshard"]), sample())
    assignment = random_assignment(captured_graph, (2,), random.Random(0), exchanges)
    options = dict(assignment.options)
    for node in captured_graph.graph.graph.nodes:
        if node.target in (EXPERTS.backward_target, ROUTE.backward_target):
            name = options[rule_of(node).gradients_of.name][0].name if alike else "whole"
            options[node.name] = tuple(option for option in rule_of(node).axis_options() if option.name == name)
        elif node.target is ROUTE.target:
            options[node.name] = tuple(option for option in rule_of(node).axis_options() if option.name == "split g")
    program = program_of(captured_graph, replace(assignment, options=options))
    assert program.backward is not None
    forward, gradients = ([node.target for node in phase.graph.nodes] for phase in (program.forward, program.backward))
    num_kept = forward.count(forward_kept) + forward.count(begin_forward_kept)
    assert num_kept == gradients.count(gradients_of_kept) == (2 if alike else 0)
    assert gradients.count(backward) == (0 if alike else 2)


def test_tokens_cross_twice_forward_and_twice_backward():
    torch.manual_seed(0)
    layer = Layer({"num_experts": 4, "router": "softmax_topk"})
    captured_graph = capture(layer, sample())
    assignment = random_assignment(captured_graph, (2,), random.Random(0))
    options = {}
    for node in operators(captured_graph):
        candidates = rule_of(node).axis_options()
        options[node.name] = (next(filter(exchanges, candidates), candidates[0]),)
    program = program_of(captured_graph, replace(assignment, options=options, leaves={}))

    def all_to_all_bytes(mesh: ThreadMesh) -> list[int]:
        run_program(program, layer, sample(), mesh)
        return [num_bytes for kind, _, num_bytes in mesh.log if kind == "all_to_all"]

    for (counts, *rows), num_tokens in zip(on_threads((2,), all_to_all_bytes), (16, 13), strict=True):
        assert counts == 2 * 2 * 8  # int64, of two experts on each of two ranks
        row_bytes = 2 * num_tokens * 8  # the width is 6; the seventh number is the row's weight, or its gradient
        assert rows == [7 * row_bytes, 6 * row_bytes, 6 * row_bytes, 7 * row_bytes]


SMALL = {"num_experts": 4, "hidden_dim": 24, "group_tokens": 24}


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [6, 5], ids=["whole groups", "a padded group"])
@pytest.mark.parametrize("prefer", [None, exchanges], ids=["any", "all-to-all"])
def test_the_translation_model_with_dropout(prefer, num_rows):
    check_at_random(*translation(num_rows, **SMALL), cases=2, seed=num_rows, prefer=prefer)


@pytest.mark.slow
def test_the_plain_module_is_captured_on_the_meta_device():
    module, sample = translation(6, **SMALL)
    captured_graph = capture(TranslationLoss.on_meta(module.model.spec, dtype=torch.float64), sample)
    assert captured_graph.digest == capture(module, sample).digest
    assert len(captured_graph.gradients) == len(list(module.parameters()))


@pytest.mark.slow
def test_a_model_of_a_trillion_weights_is_captured():
    module = TranslationLoss.on_meta(TranslationModelSpec.model_validate({"preset": "gshard-2048e-60l"}))
    rows = torch.empty((4096, 512), dtype=torch.int64, device="meta")
    captured_graph = capture(module, (rows, rows, rows, torch.empty((), dtype=torch.int64, device="meta")))
    shapes = [leaf.shape for leaf in captured_graph.leaves.values() if leaf.kind == "parameter"]
    assert sum(map(math.prod, shapes)) > 1e12
    assert len(captured_graph.gradients) == len(shapes)

"""A module applied to a layout: what each rank holds, and which placements are refused."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from moe.experts import Experts
from moe.layers import MoELayer
from moe.parallel import (
    Layout,
    ParameterShard,
    apply,
    clip_factor,
    global_norm,
    local_parameters,
    scale_gradients,
    shard_offsets,
)
from moe.plan.candidate import Options
from moe.plan.degrees import Degrees, ShardCounts
from moe.plan.placement import Placement, build_placements
from moe.spec import MoESpec, ProblemCode, SpecError
from tests.parity import trajectory
from tests.refusals import expect_problem, expect_problems

M, H, CPU = 8, 16, torch.device("cpu")


def two_ranks(**degrees: int) -> Layout:
    return Layout(0, 2, CPU, degrees)


@pytest.mark.parametrize("activation", ["relu", "swiglu"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_rank_holds_its_experts(activation: str, bias: bool, device: str) -> None:
    """Weights are initialized on the rank if the layer has none yet, else copied from the layer."""
    spec = MoESpec(num_experts=4, model_dim=M, hidden_dim=H, activation=activation, expert_bias=bias)

    def experts_on(rank: int, world_size: int, degrees: dict[str, int]) -> Experts:
        with torch.device(device):
            layer = MoELayer(spec)
        layout = Layout(rank, world_size, CPU, degrees)
        return apply(
            layer, build_placements(spec.parameters(), ShardCounts.from_degrees(layout.degrees)), layout
        ).experts

    full, half = experts_on(0, 1, {}), experts_on(1, 2, {"expert": 2})
    quarter = experts_on(3, 4, {"expert": 2, "expert_tensor": 2})
    for name, parameter in full.named_parameters():
        assert torch.equal(half.get_parameter(name), parameter[2:])
        dim = 2 if name in ("w_in", "w_gate") else 1
        assert torch.equal(quarter.get_parameter(name), parameter[2:].chunk(2, dim)[1])
    assert sum(parameter[0].numel() for parameter in full.parameters()) == spec.parameters_per_expert
    assert not torch.equal(full.w_in[0], full.w_in[1])


@pytest.mark.parametrize("dim", [0, 1])
def test_the_gathered_shard_begins_where_the_tensor_shard_does(dim: int) -> None:
    """However FSDP has split the shard that it gathers, also unevenly."""
    layout = Layout(3, 4, CPU, {"expert_fsdp": 2, "expert_tensor": 2})
    part = ParameterShard(torch.Size((3, M)), (("expert_tensor", 1), ("expert_fsdp", dim)), of_experts=True)
    assert shard_offsets(part, layout) == [0, M // 2]


LAYER = MoESpec(num_experts=4, model_dim=M, hidden_dim=H)
MATRICES = ("experts.w_in", "experts.w_out")


@pytest.mark.parametrize(
    ("degrees", "splits", "code", "names"),
    [
        ({"expert": 2}, {}, "mismatch", MATRICES),
        ({"expert": 2}, {"experts.w_in": (("expert", 1),)}, "mismatch", MATRICES),
        ({"expert_tensor": 2}, {}, "mismatch", MATRICES),
        ({"tensor": 2}, {"experts.w_in": (("tensor", 2),)}, "mismatch", ("experts.w_in",)),
        ({"tensor": 2}, {"router": (("tensor", 1),)}, "mismatch", ("router",)),
        ({"fsdp": 2}, {"experts.w_out": (("fsdp", 0),)}, "conflict", ("experts.w_out",)),
        ({"expert_fsdp": 2}, {"router": (("expert_fsdp", 0),)}, "conflict", ("router",)),
    ],
)
@pytest.mark.parametrize("origin", ["meta", "cpu", "copied"])
def test_splits_that_no_module_computes_with_are_refused(
    degrees: dict[str, int], splits: dict[str, Any], code: ProblemCode, names: tuple[str, ...], origin: str
) -> None:
    with torch.device("meta" if origin == "meta" else "cpu"):
        layer = MoELayer(LAYER)
    placements = [
        Placement(parameter=name, shape=parameter.shape, splits=splits.get(name, ()))
        for name, parameter in layer.named_parameters()
    ]
    with expect_problems([(code, f"placements.{name}.splits", list(splits.get(name, ()))) for name in names]):
        apply(deepcopy(layer) if origin == "copied" else layer, placements, two_ranks(**degrees))


@pytest.mark.parametrize("axis", ["tensor", "expert", "expert_tensor", "expert_fsdp"])
def test_undeclared_parameters_are_split_over_fsdp_alone(axis: str) -> None:
    placement = Placement.model_validate({"parameter": "weight", "shape": (4, 4), "splits": ((axis, 0),)})
    with pytest.raises(SpecError, match=r"placements\.weight\.splits"):
        apply(nn.Linear(4, 4, bias=False), [placement], two_ranks(**{axis: 2}))


def test_uneven_splits_and_missing_values_are_refused() -> None:
    placement = Placement(parameter="weight", shape=(4, 3), splits=(("fsdp", 1),))  # only dim 0 may be uneven
    with expect_problem("not_divisible", "weight.shape[1]", 3):
        apply(nn.Linear(3, 4, bias=False), [placement], two_ranks(fsdp=2))
    placement = Placement(parameter="weight", shape=(4, 3))
    with expect_problem("uninitialized", "weight", None):
        apply(nn.Linear(3, 4, bias=False, device="meta"), [placement], Layout.single())
    model = nn.Sequential(nn.Identity())
    model[0].register_buffer("positions", torch.arange(4))
    assert torch.equal(in_one_process(model)[0].positions, torch.arange(4))
    model[0].register_buffer("positions", torch.arange(4, device="meta"))
    with expect_problem("uninitialized", "0.positions", None):
        in_one_process(model)


def in_one_process(model: nn.Module, **blocks: str) -> nn.Module:
    placements = [Placement(parameter=name, shape=p.shape) for name, p in model.named_parameters()]
    return apply(model, placements, Layout.single(), {path.replace("_", "."): kind for path, kind in blocks.items()})


def test_blocks_may_be_in_any_order_and_must_exist() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    in_one_process(model, **{"1": "outer", "1_0": "inner"})
    assert {parameter.part.shape for parameter in local_parameters(model)} == {torch.Size((2, 2)), torch.Size((2,))}
    with expect_problem("not_found", "blocks", "2"):
        in_one_process(model, **{"2": "nobody"})


def test_a_shared_parameter_stays_shared_and_a_frozen_one_frozen() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    model[1].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    values = model[0].weight.detach().clone()
    in_one_process(model)
    assert model[1].weight is model[0].weight
    assert torch.equal(model[0].weight, values)
    requires_grad = [(parameter.name, parameter.local.requires_grad) for parameter in local_parameters(model)]
    assert requires_grad == [("0.weight", True), ("1.bias", False)]
    codes = nn.Linear(2, 2, bias=False)
    codes.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
    assert in_one_process(codes).weight.dtype == torch.int8


def test_a_sharded_parameter_of_two_blocks_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    placement = Placement(parameter="0.weight", shape=(2, 2), splits=(("fsdp", 0),))
    with expect_problem("conflict", "placements.0.weight.splits", [("fsdp", 0)]):
        apply(model, [placement], two_ranks(fsdp=2), {"0": "layer 0", "1": "layer 1"})


@pytest.mark.parametrize("narrow_first", [True, False])
def test_gradients_of_several_dtypes_are_clipped_to_one_norm(narrow_first: bool) -> None:
    layers = [nn.Linear(8, 8).bfloat16(), nn.Linear(64, 64)]
    model = in_one_process(nn.Sequential(*(layers if narrow_first else layers[::-1])))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.37)
    parameters = local_parameters(model)
    scale_gradients(parameters, clip_factor(global_norm(parameters, Layout.single()), 1.0))
    assert float(global_norm(parameters, Layout.single())) == pytest.approx(1.0, rel=2e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"degrees": Degrees(data=4, fsdp=4), "options": Options(overlap=True)},
        {"not_yet": ("fp8",)},
        {"profile": "peer"},
    ],
    ids=str,
)  # fmt: skip
def test_a_plan_that_cannot_be_run_is_refused(changes: dict[str, Any]) -> None:
    plan = trajectory.Degrees(data=4).plan(8).model_copy(update=changes)
    with expect_problem("not_runnable", "plan", None):
        Layout.build(plan)


def test_a_model_without_stages_is_refused_in_a_pipeline() -> None:
    with expect_problem("unsupported", "parallel.pipeline", 2):
        apply(nn.Linear(2, 2), [], two_ranks(pipeline=2))

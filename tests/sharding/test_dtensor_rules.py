"""Our rules compared with DTensor's: its options along one axis are offered here too, or listed below with the reason;
operators without a rule here use DTensor's."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from moe.sharding.capture.capture import capture
from moe.sharding.rules import dtensor
from moe.sharding.rules.registry import RULES, register, rule_of
from moe.sharding.rules.rule import Rule
from tests.refusals import expect_problem
from tests.sharding.modules import Function
from tests.sharding.partitioned import check_at_random, node_of, operators
from tests.sharding.refused import lines_of

aten = torch.ops.aten


def _float(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def _int(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


CALLS: dict[str, tuple[Any, ...]] = {
    "mm": (aten.mm.default, _float(4, 6), _float(6, 8)),
    "bmm": (aten.bmm.default, _float(2, 4, 6), _float(2, 6, 8)),
    "addmm": (aten.addmm.default, _float(8), _float(4, 6), _float(6, 8)),
    "baddbmm": (aten.baddbmm.default, _float(2, 4, 8), _float(2, 4, 6), _float(2, 6, 8)),
    "add": (aten.add.Tensor, _float(4, 6), _float(4, 6)),
    "add, broadcast": (aten.add.Tensor, _float(4, 6), _float(6)),
    "mul": (aten.mul.Tensor, _float(4, 6), _float(4, 6)),
    "div": (aten.div.Tensor, _float(4, 6), _float(4, 6)),
    "where": (aten.where.self, torch.empty(4, 6, dtype=torch.bool, device="meta"), _float(4, 6), _float(4, 6)),
    "exp": (aten.exp.default, _float(4, 6)),
    "relu": (aten.relu.default, _float(4, 6)),
    "gelu_backward": (aten.gelu_backward.default, _float(4, 6), _float(4, 6)),
    "sum": (aten.sum.dim_IntList, _float(4, 6, 8), [1]),
    "mean": (aten.mean.dim, _float(4, 6, 8), [0, 2]),
    "amax": (aten.amax.default, _float(4, 6, 8), [1]),
    "permute": (aten.permute.default, _float(4, 6, 8), [2, 0, 1]),
    "softmax": (aten._softmax.default, _float(4, 6, 8), 1, False),
    "log_softmax": (aten._log_softmax.default, _float(4, 6), -1, False),
    "softmax_backward": (aten._softmax_backward_data.default, _float(4, 6), _float(4, 6), 1, torch.float32),
    "cumsum": (aten.cumsum.default, _float(4, 6), 1),
    "sort": (aten.sort.default, _float(4, 6), 1),
    "topk": (aten.topk.default, _float(4, 6), 2, 1),
    "argmax": (aten.argmax.default, _float(4, 6), 1),
    "max": (aten.max.dim, _float(4, 6), 1),
    "layer_norm": (aten.native_layer_norm.default, _float(4, 6, 8), [8], _float(8), _float(8), 1e-5),
    "layer_norm_backward": (
        aten.native_layer_norm_backward.default, _float(4, 6, 8), _float(4, 6, 8), [8], _float(4, 6, 1),
        _float(4, 6, 1), _float(8), _float(8), [True, True, True],
    ),
    "rms_norm": (aten._fused_rms_norm.default, _float(4, 6, 8), [8], _float(8), 1e-5),
    "embedding": (aten.embedding.default, _float(8, 6), _int(4, 2)),
    "embedding_backward": (aten.embedding_dense_backward.default, _float(4, 2, 6), _int(4, 2), 8, -1, False),
    "gather": (aten.gather.default, _float(4, 6), 1, _int(4, 2)),
    "scatter_add": (aten.scatter_add.default, _float(4, 6), 1, _int(4, 2), _float(4, 2)),
    "scatter": (aten.scatter.src, _float(4, 6), 1, _int(4, 2), _float(4, 2)),
    "index_select": (aten.index_select.default, _float(4, 6), 1, _int(8)),
    "index": (aten.index.Tensor, _float(4, 6), [None, _int(8)]),
    "index of two": (aten.index.Tensor, _float(4, 6, 2), [_int(8), _int(8)]),
    "index_put": (aten.index_put.default, _float(4, 6), [_int(8)], _float(8, 6), True),
    "flip": (aten.flip.default, _float(4, 6), [1]),
    "cat": (aten.cat.default, [_float(4, 6), _float(4, 2)], 1),
    "constant_pad_nd": (aten.constant_pad_nd.default, _float(4, 6), [1, 1]),
    "native_dropout_backward": (aten.native_dropout_backward.default, _float(4, 6),
                                torch.empty(4, 6, dtype=torch.bool, device="meta"), 2.0),
    "inverse": (aten.linalg_inv_ex.default, _float(2, 4, 4)),
}  # fmt: skip

_ADDED = "what is added to a product is a bias, whole or split, never partial sums worth keeping"
_MONOTONE = "partial maxima and minima are combined before any other operator: they are small and rare"
REASONS: dict[tuple[str, str], str] = {
    **{(name, f"{placements} -> P(sum)"): _ADDED for name, placements in (
        ("addmm", "P(sum), P(sum), R"), ("addmm", "P(sum), R, P(sum)"), ("addmm", "P(sum), S(1), S(0)"),
        ("baddbmm", "P(sum), P(sum), R"), ("baddbmm", "P(sum), R, P(sum)"), ("baddbmm", "P(sum), S(2), S(1)"),
    )},
    **{(name, f"P({combine}), R -> P({combine})"): _MONOTONE
       for name in ("add", "add, broadcast") for combine in ("max", "min")},
    **{(name, f"P({combine}) -> P({combine})"): _MONOTONE
       for name in ("exp", "relu", "constant_pad_nd") for combine in ("max", "min")},
}  # fmt: skip
"""Why options of DTensor's are not offered, by name of the call and placements."""


@pytest.mark.parametrize("name", CALLS)
def test_options_of_dtensor_are_offered(name: str) -> None:
    node = call(*CALLS[name])
    dtensor_options = {(option.operands, option.results) for option in dtensor.options(node)}
    assert dtensor_options, "DTensor has a rule for it"
    missing = dtensor_options - {(option.operands, option.results) for option in rule_of(node).axis_options()}
    assert {(name, f"{', '.join(map(str, before))} -> {', '.join(map(str, after))}") for before, after in missing} == {
        reason for reason in REASONS if reason[0] == name
    }


def call(target: Any, *args: Any) -> fx.Node:
    node = node_of(target, *args)
    node.meta["val"] = target(*args)
    return node


@pytest.mark.slow
def test_operators_without_a_rule_use_those_of_dtensor() -> None:
    sample = (torch.rand(4, 3, 3, 2, dtype=torch.float64) * 2 - 1,)
    module = Function(
        lambda images, grid: F.grid_sample(images * 2, grid, align_corners=True).sin(),
        torch.randn(4, 2, 5, 6, dtype=torch.float64),
    )
    dtensor_nodes = [node for node in operators(capture(module, sample)) if rule_of(node).extra_options]
    assert {node.target for node in dtensor_nodes} == {
        aten.grid_sampler_2d.default,
        aten.grid_sampler_2d_backward.default,
    }
    assert all(any(option.operands[0].dim == 0 for option in rule_of(node).extra_options) for node in dtensor_nodes)
    check_at_random(module, sample, cases=20)
    check_at_random(module, sample, cases=10, seed=1, prefer=lambda option: option.name.startswith("torch's"))


def test_parts_of_dtensor_rules_are_even() -> None:
    node = call(aten.grid_sampler_2d.default, _float(6, 2, 4, 4), _float(6, 3, 3, 2), 0, 0, True)
    rule = rule_of(node)
    (rows,) = [option for option in rule.extra_options if option.operands[0].dim == 0]
    assert rule.is_possible([rows], [3])
    assert rule.is_possible([rows, rows], [3, 2])
    assert not rule.is_possible([rows], [4])


@torch.library.custom_op("shardyard_test::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.slow
def test_a_users_operator_has_the_registered_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    module, sample = Function(lambda x: twice(x)), (torch.randn(5, 4, dtype=torch.float64),)  # twice
    (node,) = operators(capture(module, sample))
    with expect_problem("no_sharding_rule", lines_of(__file__)("twice"), "shardyard_test.twice.default"):
        rule_of(node)
    monkeypatch.setattr("moe.sharding.rules.registry.RULES", dict(RULES))
    register(torch.ops.shardyard_test.twice.default, _rows)
    check_at_random(module, sample, cases=8)
    assert [option.name for option in rule_of(node).axis_options()] == ["whole", "split rows"]


def _rows(node: fx.Node) -> Rule:
    return Rule(((("rows",), ()),), ((("rows",), ()),), {"rows": 5})


def test_an_operator_that_dtensor_only_replicates_has_no_rule() -> None:
    x = _float(4, 4)
    with expect_problem("no_sharding_rule", "masked_scatter_default", "aten.masked_scatter.default"):
        rule_of(call(aten.masked_scatter.default, x, x > 0, x))

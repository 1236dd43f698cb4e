"""Cross-entropy over a vocabulary as one operator, sharded by tokens with a replicated table."""

from collections.abc import Mapping

import torch
from torch import Tensor, fx

from moe.layers import nll
from moe.sharding.exchange.mesh import Mesh
from moe.sharding.operands import shape_of
from moe.sharding.rules.differentiable import OperatorSharding, define_differentiable, lower_backward, lower_forward
from moe.sharding.rules.local import LocalCall
from moe.sharding.rules.registry import register
from moe.sharding.rules.rule import Dims, Factor, Rule


def smoothed_nll(
    hidden_states: Tensor,
    table: Tensor,
    labels: Tensor,
    smoothing: float,
    ignore_index: int,
    positions: Tensor | None = None,
    *,
    projects_all: bool = False,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`moe.layers.nll.smoothed_nll` by the operator, which finds the positions itself."""
    hidden_TM, labels_T = hidden_states.reshape(-1, hidden_states.shape[-1]), labels.reshape(-1)
    return torch.ops.shardyard.smoothed_nll(hidden_TM, table, labels_T - ignore_index, smoothing, ignore_index, cap)


def _run(
    mesh: Mesh,
    sharding: OperatorSharding,
    hidden_states: Tensor,
    table: Tensor,
    labels: Tensor,
    smoothing: float,
    ignore_index: int,
    cap: float | None,
) -> tuple[Tensor, ...]:
    """`labels` are relative to `ignore_index`, so zero-padded tokens, on ranks that have fewer, are ignored."""
    return nll.smoothed_nll(hidden_states, table, labels + ignore_index, smoothing, ignore_index, cap=cap)


def _scalars(hidden_states: Tensor, *arguments: object) -> tuple[Tensor, ...]:
    wide = torch.promote_types(hidden_states.dtype, torch.float32)
    return hidden_states.new_empty((), dtype=wide), hidden_states.new_empty((), dtype=wide)


NLL = define_differentiable(
    "smoothed_nll",
    "Tensor hidden, Tensor table, Tensor labels, float smoothing, int nothing, float? cap",
    _run,
    _scalars,
    num_results=2,
    differentiable=(0, 1),
    differentiable_results=(0,),
)


def _rule(node: fx.Node) -> Rule:
    is_backward = node.target is NLL.backward_target
    hidden_states, table = node.args[1:3] if is_backward else node.args[:2]
    num_tokens, width = shape_of(hidden_states)  # type: ignore[arg-type]
    dims: tuple[Dims, ...] = ((("t",), ("m",)), (("v",), ("m",)), (("t",),))
    first = int(is_backward)
    return Rule(
        operands=((), *dims) if is_backward else dims,
        results=dims[:2] if is_backward else ((), ()),
        sizes={"t": num_tokens, "v": shape_of(table)[0], "m": width},  # type: ignore[arg-type]
        combine={"t": "sum"},
        whole_factors=frozenset({"v", "m"}),
        linear=(frozenset({0}),) if is_backward else (),
        indices=frozenset({first + 2}),  # padding has no label and is not projected
        unmasked=frozenset({first}),
        # Gradients are computed in the forward pass.
        work="memory" if is_backward else "product",
        flops=6.0,
        saved_elements=None if is_backward else _gradients,
        lower=_lower_backward if is_backward else _lower_forward,
        gradients_of=NLL.forward_of(node) if is_backward else None,
    )


def _gradients(local_sizes: Mapping[Factor, float]) -> float:
    return (local_sizes["t"] + local_sizes["v"]) * local_sizes["m"]


def _lower_forward(local: LocalCall) -> fx.Node:
    return lower_forward(local, NLL, ())


def _lower_backward(local: LocalCall) -> fx.Node:
    return lower_backward(local, NLL, ())


register(NLL.target, _rule)
register(NLL.backward_target, _rule)

"""Dispatch, experts and combine as one operator of a captured graph, sharded by tokens, experts or hidden units, or by
tokens and experts along one axis with all-to-alls. Data-dependent row counts stay inside it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from moe.dispatch import AllToAllDispatcher, LocalDispatcher
from moe.dispatch.exchange import ExpertExchange
from moe.experts import (
    BACKENDS,
    Activation,
    Costs,
    ExpertComputation,
    ExpertWeights,
    LocalComputation,
    build_activation,
)
from moe.layers.moe import MoELayer
from moe.routing import Choices, SortedChoices
from moe.sharding.bindings.mesh_rows import MeshRows
from moe.sharding.exchange.mesh import Mesh
from moe.sharding.operands import shape_of
from moe.sharding.rules.differentiable import (
    OperatorSharding,
    define_differentiable,
    lower_backward,
    lower_begun,
    lower_forward,
)
from moe.sharding.rules.local import LocalCall
from moe.sharding.rules.registry import register
from moe.sharding.rules.rule import Dims, Exchange, Factor, GroupedMatmul, Rule

MAX_CHUNKS = 2
"""Maximum number of chunks: one is sent while experts compute the other."""
CHUNK_ROWS = 256
"""Minimum average rows per expert and chunk: below it, smaller matrix products cost more than overlap saves."""


def run_experts(layer: MoELayer, x_TM: Tensor, choices: Choices) -> Tensor:
    """`MoELayer.run_experts` as one operator. Raises ValueError for adapters and quantized weights.

    Where weights multiply the experts' inputs, each choice is a token of its own, with weight 1 for its output.
    """
    assert isinstance(choices, SortedChoices)
    expert, weight, kept = choices.expert, choices.weight, choices.kept
    if layer.experts.scales_inputs:
        x_TKM = x_TM[:, None] * weight.to(x_TM.dtype)[..., None]
        x_TM = x_TKM.flatten(0, 1)
        expert, kept = (tensor.reshape(-1, 1) for tensor in (expert, kept))
        weight = torch.ones_like(weight).reshape(-1, 1)
    choice_tensors = (expert, weight, kept)
    weights, activation = layer.experts.weights, layer.experts.activation
    if weights.is_quantized or any(adapter is not None for adapter in weights.adapters):
        raise ValueError("experts cannot be captured with adapters; merge them into the weights")
    outputs = torch.ops.shardyard.expert_feed_forward(
        x_TM, *choice_tensors, *weights.base_tensors, activation.name, activation.settings
    )
    return outputs.unflatten(0, choices.expert.shape).sum(1) if layer.experts.scales_inputs else outputs


@dataclass(frozen=True)
class _OperandExperts:
    """Experts whose weights are operands of the operator."""

    weights: ExpertWeights
    activation: Activation
    recompute: bool = False
    scales_inputs: bool = False
    costs: Costs = field(default_factory=dict)

    def __call__(self, rows: Tensor, scale: Tensor, computation: ExpertComputation) -> Tensor:
        return computation.run(rows, scale, self.weights)

    def local_computation(self, counts: list[int]) -> LocalComputation:
        return LocalComputation(counts, self.activation, BACKENDS["segments"])


def _run(mesh: Mesh, sharding: OperatorSharding, *arguments: Any) -> tuple[Tensor, ...]:
    return _begin(mesh, sharding, *arguments)()


def _begin(mesh: Mesh, sharding: OperatorSharding, *arguments: Any) -> Callable[[], tuple[Tensor, ...]]:
    """Start sending tokens to experts, if they are exchanged. The returned function returns the tokens' sums.

    `sharding` is (number of experts, their axes, axes of hidden units, axis along which both tokens and experts are
    sharded and exchanged, or None).
    """
    x, expert, weight, is_kept, *tensors, activation, settings = arguments
    num_experts, expert_axes, hidden_axes, exchange_axis = sharding or (tensors[0].shape[0], (), (), None)
    b_out = tensors[4]
    if b_out is not None and not mesh.is_first(hidden_axes):
        tensors[4] = torch.zeros_like(b_out)  # only one shard adds it
    experts = _OperandExperts(ExpertWeights.from_tensors(tensors), build_activation(activation, settings))
    num_local_experts = tensors[0].shape[0]
    if exchange_axis is not None:
        transport = MeshRows(mesh, exchange_axis)
        choices = SortedChoices(expert, weight, is_kept, transport.num_ranks * num_local_experts)
        # from shapes only, so that all ranks agree
        num_chunks = max(1, min(MAX_CHUNKS, expert.numel() // num_local_experts // CHUNK_ROWS))
        dispatcher = AllToAllDispatcher(transport, num_chunks=num_chunks)
        rows, scale, computation, combiner = dispatcher(x, choices, experts)
        assert isinstance(computation, ExpertExchange)
        exchange = computation.send_first_chunk(rows, scale)
        return lambda: (combiner.combine(experts(rows, scale, exchange)),)
    if expert_axes:
        expert = expert - mesh.first(num_experts, expert_axes)
        is_kept = is_kept & (expert >= 0) & (expert < mesh.valid(num_experts, expert_axes))
    local_choices = SortedChoices(expert, weight, is_kept, num_local_experts)

    def run() -> tuple[Tensor, ...]:
        rows, scale, computation, combiner = LocalDispatcher()(x, local_choices, experts)
        return (combiner.combine(experts(rows, scale, computation)),)

    return run


EXPERTS = define_differentiable(
    "expert_feed_forward",
    "Tensor x, Tensor expert, Tensor weight, Tensor kept, Tensor w_in, Tensor w_out, Tensor? w_gate, Tensor? b_in, "
    "Tensor? b_out, Tensor? b_gate, str activation, float[] settings",
    _run,
    lambda x, *arguments: (torch.empty_like(x),),
    num_results=1,
    differentiable=(0, 2, 4, 5, 6, 7, 8, 9),
    differentiable_results=(0,),
    begin=_begin,
)
_DIMS: tuple[Dims, ...] = (
    (("t",), ("m",)),
    (("t",), ()),
    (("t",), ()),
    (("t",), ()),
    (("e",), ("m",), ("h",)),
    (("e",), ("h",), ("m",)),
    (("e",), ("m",), ("h",)),
    (("e",), ("h",)),
    (("e",), ("m",)),
    (("e",), ("h",)),
)
"""Dims of the operator's tensors; the result has those of the first."""


def _facts(node: fx.Node, first: int) -> Iterator[tuple[int, Dims, fx.Node]]:
    """(index, dims, tensor) of the operator's tensors, which start at argument `first`."""
    for index, dims in enumerate(_DIMS):
        if isinstance(tensor := node.args[first + index], fx.Node):
            yield index, dims, tensor


def _rule(node: fx.Node) -> Rule:
    return _rule_of(node, 0)


def _backward_rule(node: fx.Node) -> Rule:
    return _rule_of(node, 1)


def _rule_of(node: fx.Node, num_gradients: int) -> Rule:
    facts = list(_facts(node, num_gradients))
    dims = [tensor_dims for _, tensor_dims, _ in facts]
    sizes = {
        factor: size
        for _, tensor_dims, tensor in facts
        for factors, size in zip(tensor_dims, shape_of(tensor), strict=True)
        for factor in factors
    }
    num_tokens, per_token = shape_of(facts[1][2])
    width, itemsize = sizes["m"], facts[0][2].meta["val"].dtype.itemsize
    num_matrices = sum(index in (4, 5, 6) for index, _, _ in facts)
    is_backward = num_gradients > 0
    results = (
        [tensor_dims for index, tensor_dims, _ in facts if index in EXPERTS.differentiable]
        if is_backward
        else [_DIMS[0]]
    )
    operand_dims = [_DIMS[0]] * num_gradients + dims
    on_tokens = {index for index, tensor_dims in enumerate(operand_dims) if tensor_dims[0] == ("t",)}

    def exchanged_bytes(degree: int) -> float:
        """Bytes that a rank sends: rows and weights to the experts, and rows back; in the backward pass, gradients of
        outputs to the experts, and gradients of rows and weights back."""
        return -(-num_tokens // degree) * per_token * (2 * width + 1) * itemsize

    def kept_elements(local_sizes: Mapping[Factor, float]) -> float:
        """Elements of the experts' inputs and of the first matrices' outputs."""
        rows = local_sizes["t"] * per_token * local_sizes["e"] / sizes["e"]
        return rows * (local_sizes["m"] + (num_matrices - 1) * local_sizes["h"])

    exchange = Exchange(
        "experts",
        operands=(0,) * len(operand_dims),
        results=(0,) * len(results),
        moved_bytes=exchanged_bytes,
        lower=_lower,
        kind="all_to_all",
        times=2 if is_backward else 3,  # counts, rows, and rows back
        shared=frozenset({"t"}),
    )
    forward_node = EXPERTS.forward_of(node) if is_backward else None
    passes = 1 if not is_backward else 3 if forward_node is None else 2  # without it, the forward pass is recomputed
    return Rule(
        operands=tuple(operand_dims),
        results=tuple(results),
        sizes=sizes,
        combine={"t": "sum", "e": "sum", "h": "sum"},
        whole_factors=frozenset({"m"}),
        linear=(frozenset({0}),) if is_backward else (frozenset({2}),),
        indices=frozenset({num_gradients + 1, num_gradients + 3}),
        unmasked=frozenset(on_tokens),
        work="product",
        flops=2.0 * num_matrices * per_token / sizes["e"] * passes,
        grouped=GroupedMatmul("e", "t", per_token, passes),
        saved_elements=None if is_backward else kept_elements,
        exchanges=(exchange,) if sizes["e"] > 1 else (),
        lower=_lower,
        gradients_of=forward_node,
    )


def _lower(local: LocalCall, exchange_axis: int | None = None) -> fx.Node:
    sharding = (local.rule.sizes["e"], local.axes("e"), local.axes("h"), exchange_axis)
    if local.node.target is EXPERTS.backward_target:
        return lower_backward(local, EXPERTS, sharding)
    return (lower_forward if exchange_axis is None else lower_begun)(local, EXPERTS, sharding)


register(EXPERTS.target, _rule)
register(EXPERTS.backward_target, _backward_rule)

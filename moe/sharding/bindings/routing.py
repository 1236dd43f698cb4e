"""Routing as one operator of a captured graph, for every router: groups are sharded, and statistics over groups are
returned as sums."""

from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional
from torch.utils import _pytree as pytree

from moe.layers.moe import MoELayer
from moe.routing import Routing, RoutingState, SortedChoices, TokenContext, build_router
from moe.routing.choices import ChoicesByExpert, ChoicesByToken
from moe.sharding.exchange.mesh import Mesh
from moe.sharding.operands import shape_of
from moe.sharding.rules.differentiable import OperatorSharding, define_differentiable, lower_backward, lower_forward
from moe.sharding.rules.local import LocalCall
from moe.sharding.rules.registry import register
from moe.sharding.rules.rule import Dims, Factor, Rule
from moe.spec import MoESpec
from moe.spec.routers import ExpertChoiceSpec

_LOGITS, _IDS, _PADDING, _STEP, _BIAS, _LAST_LOAD = range(6)
_GROUP_ARGUMENTS = (_LOGITS, _IDS, _PADDING)
"""Arguments whose first dimension is groups."""
_NUM_BY_GROUP = 4
"""Number of results whose first dimension is groups."""


def route_tokens(layer: MoELayer, logits: Tensor, tokens: TokenContext) -> Routing:
    """`MoELayer.route_tokens` as one operator. Under expert choice, each token lists all experts as its choices, kept
    or not. Raises ValueError while routing is recorded or replayed."""
    spec, state = layer.spec, layer.state
    if type(layer.route) is not type(build_router(spec)):
        raise ValueError(
            f"model (with MoE layer {layer.layer}) cannot be captured while its routing is recorded or replayed; "
            "capture it before"
        )
    _let_it_be_returned()
    number, step = (0, tokens.step) if isinstance(tokens.step, Tensor) else (tokens.step, None)
    (
        expert, weight, is_kept, position,
        aux, units, z, entropy, num_rejected, num_dropped, choice_counts, load, num_choices, num_tokens,
    ) = torch.ops.shardyard.route(
        logits, tokens.keys(logits), tokens.padding, step, state.bias, state.last_load,
        spec.model_dump_json(), number, tokens.seed, layer.layer, tokens.training, tokens.sequence_tokens,
    )  # fmt: skip
    token_choices = expert.flatten(0, 1), weight.flatten(0, 1), is_kept.flatten(0, 1), position.flatten(0, 1)
    some_choices = num_choices.clamp(min=1).to(logits.dtype)
    some_tokens = num_tokens.clamp(min=1).to(logits.dtype)
    return Routing(
        SortedChoices(*token_choices[:3], spec.num_experts, load),
        *token_choices,
        num_groups=logits.shape[0],
        capacity=spec.routing.capacity(logits.shape[1], spec.num_experts) if tokens.training else None,
        chosen=choice_counts,
        aux_loss=aux / units.clamp(min=1),
        aux_units=units,
        z_loss=z / some_tokens,
        entropy=entropy / some_tokens,
        rejected=num_rejected / some_choices,
        dropped=num_dropped / some_choices,
        num_choices=num_choices,
        num_tokens=num_tokens,
    )


@cache
def _let_it_be_returned() -> None:
    """Register routings as pytrees, so that a captured module may return them."""
    for kind in (Routing, SortedChoices):
        pytree.register_dataclass(kind)


@lru_cache(maxsize=64)
def _spec(spec_json: str) -> MoESpec:
    return MoESpec.model_validate_json(spec_json)


def _num_choices(spec: MoESpec) -> int:
    """K, or E under expert choice."""
    return spec.num_experts if isinstance(spec.routing, ExpertChoiceSpec) else spec.experts_per_token


def _shapes(logits: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    spec_json = arguments[5]
    spec = _spec(spec_json)
    by_choice = (*logits.shape[:2], _num_choices(spec))
    by_expert, integer_dtype = (spec.num_experts,), torch.int64
    return (
        logits.new_empty(by_choice, dtype=integer_dtype),
        logits.new_empty(by_choice),
        logits.new_empty(by_choice, dtype=torch.bool),
        logits.new_empty(by_choice, dtype=integer_dtype),
        *(logits.new_empty(()) for _ in range(6)),
        *(logits.new_empty(shape, dtype=integer_dtype) for shape in (by_expert, by_expert, (), ())),
    )


def _run(mesh: Mesh, sharding: OperatorSharding, *arguments: Any) -> tuple[Tensor, ...]:
    """`sharding` is (number of groups, mesh axes that split them)."""
    if not sharding or not sharding[1]:
        return _route(*arguments)
    num_groups, local_arguments = arguments[_LOGITS].shape[0], list(arguments)
    valid = mesh.valid(*sharding)
    for number in _GROUP_ARGUMENTS:
        if local_arguments[number] is not None:
            local_arguments[number] = local_arguments[number][:valid]
    results = _route(*local_arguments)
    if valid == num_groups:
        return results
    by_group = [functional.pad(result, (0, 0, 0, 0, 0, num_groups - valid)) for result in results[:_NUM_BY_GROUP]]
    return *by_group, *results[_NUM_BY_GROUP:]


def _route(
    logits: Tensor,
    ids: Tensor,
    padding: Tensor | None,
    step: Tensor | None,
    bias: Tensor | None,
    last_load: Tensor | None,
    spec_json: str,
    number: int,
    seed: int,
    layer: int,
    training: bool,
    sequence_tokens: int | None,
) -> tuple[Tensor, ...]:
    spec = _spec(spec_json)
    number = number if step is None else int(step)
    tokens = TokenContext(ids, padding, number, seed, training, sequence_tokens)
    routing = build_router(spec)(logits, tokens, layer, RoutingState(bias, last_load))
    by_choice = (*logits.shape[:2], _num_choices(spec))
    expert, weight, is_kept, position = (tensor.reshape(by_choice) for tensor in _by_token(routing, spec))
    num_tokens, num_choices = (count.to(logits.dtype) for count in (routing.num_tokens, routing.num_choices))
    units = routing.aux_units.to(logits.dtype)
    shares = (routing.rejected * num_choices, routing.dropped * num_choices)
    sums = (routing.aux_loss * units, units, routing.z_loss * num_tokens, routing.entropy * num_tokens, *shares)
    counts = (routing.chosen, routing.load, routing.num_choices, routing.num_tokens)
    return expert, weight, is_kept, position, *sums, *counts


def _by_token(routing: Routing, spec: MoESpec) -> tuple[Tensor, ...]:
    """(expert, weight, is_kept, position), each `[T, K]`."""
    if not isinstance(choices := routing.choices, ChoicesByExpert):
        assert isinstance(choices, ChoicesByToken)
        return choices.expert, choices.weight, choices.kept, choices.position
    token, expert, is_kept = choices.pairs
    shape = (choices.num_tokens, spec.num_experts)
    place = token * spec.num_experts + expert
    weights = torch.where(is_kept, choices.weight.reshape(-1), 0.0)
    weight = weights.new_zeros(shape).view(-1).index_add(0, place, weights).view(shape)
    number = expert.new_zeros(shape).view(-1).index_add(0, place, is_kept.to(expert.dtype)).view(shape)
    experts = torch.arange(spec.num_experts, device=expert.device).expand(shape)
    return experts.contiguous(), weight, number > 0, torch.zeros_like(experts)


ROUTE = define_differentiable(
    "route",
    "Tensor logits, Tensor ids, Tensor? padding, Tensor? step, Tensor? bias, Tensor? last_load, str spec, int number, "
    "int seed, int layer, bool training, int? sequence_tokens",
    _run,
    _shapes,
    num_results=14,
    differentiable=(_LOGITS,),
    differentiable_results=(1, 4, 6),
)
_BY_CHOICE: Dims = (("g",), ("s",), ())
_ARGUMENTS: dict[int, Dims] = {
    _LOGITS: _BY_CHOICE,
    _IDS: (("g",), ("s",)),
    _PADDING: (("g",), ("s",)),
    _STEP: (),
    _BIAS: ((),),
    _LAST_LOAD: ((),),
}
_RESULTS: tuple[Dims, ...] = (*[_BY_CHOICE] * _NUM_BY_GROUP, *[()] * 6, ((),), ((),), (), ())


def _rule(node: fx.Node) -> Rule:
    is_backward = node.target is ROUTE.backward_target
    arguments = node.args[len(ROUTE.differentiable_results) :] if is_backward else node.args
    gradients = node.args[: len(ROUTE.differentiable_results)] if is_backward else ()
    gradient_dims = [
        _RESULTS[number]
        for number, gradient in zip(ROUTE.differentiable_results, gradients, strict=False)
        if gradient is not None
    ]
    dims = [argument_dims for number, argument_dims in _ARGUMENTS.items() if isinstance(arguments[number], fx.Node)]
    num_groups, group_tokens, num_experts = shape_of(arguments[_LOGITS])  # type: ignore[arg-type]

    def kept_elements(local_sizes: Mapping[Factor, float]) -> float:
        """Elements saved for the backward pass: two forms of the router scores."""
        return 2 * local_sizes.get("g", 1) * group_tokens * num_experts

    return Rule(
        operands=(*gradient_dims, *dims),
        results=(_BY_CHOICE,) if is_backward else _RESULTS,
        sizes={factor: size for factor, size in (("g", num_groups), ("s", group_tokens)) if size > 1},
        combine={"g": "sum"},
        whole_factors=frozenset({"s"}),
        linear=(frozenset(range(len(gradient_dims))),) if is_backward else (),
        unmasked=frozenset(range(len(gradient_dims) + len(dims))),
        saved_elements=None if is_backward else kept_elements,
        lower=_lower_backward if is_backward else _lower_forward,
        gradients_of=ROUTE.forward_of(node) if is_backward else None,
    )


def _lower_forward(local: LocalCall) -> fx.Node:
    return lower_forward(local, ROUTE, _sharding(local))


def _lower_backward(local: LocalCall) -> fx.Node:
    return lower_backward(local, ROUTE, _sharding(local))


def _sharding(local: LocalCall) -> OperatorSharding:
    return local.rule.sizes.get("g", 1), local.axes("g")


register(ROUTE.target, _rule)
register(ROUTE.backward_target, _rule)

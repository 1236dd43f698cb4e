"""Routing on a GPU by kernels, for top-k routers."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe.kernels.support import MAX_EXPERTS, has_kernels
from moe.routing import Router, Routing, RoutingState, TokenContext
from moe.routing.assignments import Queues
from moe.routing.balance import tokens_per_scope
from moe.routing.choices import Choices, ChoicesByToken, UnqueuedChoices
from moe.routing.sigmoid import SigmoidTopK
from moe.routing.softmax import SoftmaxTopK
from moe.spec import MoESpec
from moe.spec.routers import GatedTopKSpec, SigmoidTopKSpec, SoftmaxTopKSpec

if TYPE_CHECKING:
    from moe.kernels.routing import LossScales, RoutedTokens, TopKConstants

_MAX_SCOPES = 4096
"""Most scopes of balancing, over which single programs loop."""
_KERNEL_EPS = 1e-20
"""Epsilon of renormalization in the kernels."""


def route_by_kernels(
    router: Router, layer_spec: MoESpec, logits: Tensor, tokens: TokenContext, state: RoutingState
) -> Routing | None:
    """The routing of `router` for `logits` `[G, S, E]` of a layer with `layer_spec`.

    None where the kernels do not apply: on CPUs; for other routers, including wrappers that record or replay choices;
    for other dtypes; for another epsilon of renormalization; for admission by probability; for several groups of
    experts, unless both numbers are powers of 2; and for more than `_MAX_SCOPES` balancing scopes, or token groups with
    capacity.
    """
    spec = router.spec
    num_groups, group_tokens, num_experts = logits.shape
    capacity_rows = spec.capacity(group_tokens, num_experts) if tokens.training else None
    if (
        not has_kernels(logits, "routing")
        or logits.dtype != torch.float32
        or unsupported_router(router, num_experts, drops=capacity_rows is not None) is not None
        or (capacity_rows is not None and num_groups > _MAX_SCOPES)
    ):
        return None
    is_global = spec.aux_scope == "global_batch"
    num_tokens = num_groups * group_tokens
    scope_tokens = num_tokens if is_global else tokens_per_scope(spec.aux_scope, group_tokens, tokens)
    scopes = (num_tokens // max(1, scope_tokens), scope_tokens)
    if scopes[0] > _MAX_SCOPES:
        return None
    from moe.kernels.capacity import Capacity
    from moe.kernels.routing import route_top_k

    routed = route_top_k(
        logits.reshape(*scopes, num_experts),
        None if tokens.padding is None else tokens.padding.reshape(scopes),
        _constants_of(spec),
        bias_E=state.bias,
        last_load_E=state.last_load if is_global else None,
        scales=_loss_scales(spec, layer_spec, tokens),
        capacity=None if capacity_rows is None else Capacity(num_groups, capacity_rows),
    )
    admitted = routed.admitted
    return Routing(
        _choices_of(routed, num_groups),
        expert=routed.expert,
        weight=routed.weight,
        kept=routed.kept,
        known_position=None if admitted is None else admitted.position_TK,
        num_groups=num_groups,
        capacity=capacity_rows,
        chosen=routed.chosen,
        aux_loss=routed.aux_loss,
        aux_units=routed.counts[1 if is_global else 0],
        z_loss=routed.z_loss,
        entropy=routed.entropy,
        rejected=routed.scalars[0],
        dropped=routed.scalars[1],
        num_choices=routed.counts[2],
        num_tokens=routed.counts[1],
        weighted_loss=None if _needs_tokens_on_device(spec, layer_spec, tokens) else routed.weighted_loss,
        one=routed.scalars[2],
    )


def unsupported_router(router: Router, num_experts: int, *, drops: bool) -> str | None:
    """Property of a router for which there are no kernels; None if there are. `drops`: whether a capacity limits
    experts."""
    spec = router.spec
    if type(router) not in (SoftmaxTopK, SigmoidTopK):
        return f"router {spec.router}"
    if num_experts > MAX_EXPERTS:
        return f"{num_experts} experts, more than {MAX_EXPERTS}"
    if spec.num_expert_groups > 1 and not (_is_power_of_2(num_experts) and _is_power_of_2(spec.num_expert_groups)):
        return f"{num_experts} experts in {spec.num_expert_groups} groups, not both powers of 2"
    if isinstance(spec, SigmoidTopKSpec) and spec.renormalize_eps != _KERNEL_EPS:
        return f"renormalize_eps {spec.renormalize_eps:g}"
    return f"drop_by {spec.drop_by}" if drops and spec.drop_by != "position" else None


def _constants_of(spec: GatedTopKSpec) -> "TopKConstants":
    from moe.kernels.routing import TopKConstants

    is_softmax = isinstance(spec, SoftmaxTopKSpec)
    return TopKConstants(
        spec.top_k,
        "softmax" if is_softmax else "sigmoid",
        renormalizes=spec.renormalizes or (isinstance(spec, SoftmaxTopKSpec) and spec.softmax == "after_topk"),
        scaling_factor=spec.routed_scaling_factor,
        num_groups=spec.num_expert_groups,
        groups_per_token=spec.expert_groups_per_token,
        num_best=1 if is_softmax else 2,
        is_balanced_by_last_load=spec.aux_scope == "global_batch",
    )


def _loss_scales(spec: GatedTopKSpec, layer_spec: MoESpec, tokens: TokenContext) -> "LossScales":
    """Coefficients of the losses, and their denominators over the batch, if `tokens` has them."""
    from moe.kernels.routing import LossScales

    coefficient, scope = spec.auxiliary_loss
    scales = LossScales(coefficient, layer_spec.z_coefficient)
    if tokens.batch is None:
        return scales
    num_tokens = tokens.batch.num_tokens if isinstance(tokens.batch.num_tokens, int) else 0
    batch_units = {
        "group": tokens.batch.num_groups, "sequence": tokens.batch.num_sequences, "global_batch": num_tokens,
    }  # fmt: skip
    return replace(scales, aux_units=batch_units[scope], num_tokens=num_tokens)


def _needs_tokens_on_device(spec: GatedTopKSpec, layer_spec: MoESpec, tokens: TokenContext) -> bool:
    """Whether a loss is a mean over a number of tokens in device memory, which the kernels do not read."""
    if tokens.batch is None or isinstance(tokens.batch.num_tokens, int):
        return False
    coefficient, scope = spec.auxiliary_loss
    return bool(layer_spec.z_coefficient) or (bool(coefficient) and scope == "global_batch")


def _choices_of(routed: "RoutedTokens", num_groups: int) -> Choices:
    by_token, admitted = (routed.expert, routed.weight, routed.kept), routed.admitted
    if admitted is None:
        return UnqueuedChoices(*by_token, num_groups, routed.chosen)
    num_tokens, top_k = routed.expert.shape
    position_GSK = admitted.position_TK.view(num_groups, num_tokens // max(1, num_groups), top_k)
    slots = Queues(position_GSK, admitted.length_GE)
    return ChoicesByToken(*by_token, admitted.position_TK, slots, admitted.load_E, admitted.rows)


def _is_power_of_2(number: int) -> bool:
    return number & (number - 1) == 0

"""GShard's top-2 gating (arXiv 2006.16668, Algorithm 1, and the authors' code, Lingvo `Top2GatingOnLogits`)."""

import torch
from torch import Tensor

from moe.random import Purpose, fold, gumbel, uniform
from moe.routing.capacity import expert_capacity, running_positions
from moe.routing.routing import Assignments, Routing
from moe.routing.tokens import TokenContext
from moe.spec import MoESpec


def route_top2(logits: Tensor, spec: MoESpec, tokens: TokenContext, layer: int) -> Routing:
    """Route groups of tokens to their two best experts.

    `logits` `[G, S, E]`; softmax and weights are computed in float32 or wider. Every group is routed on its
    own. In training a token is dropped where its expert's buffer is full; evaluation takes both choices of
    every token, draws nothing and drops nothing.
    """
    num_groups, group_tokens, num_experts = logits.shape
    wide = logits if logits.dtype == torch.float64 else logits.to(torch.float32)
    probs_GSE = wide.softmax(dim=-1)
    real_GS = _real(tokens, logits)
    key = fold(tokens.seed, tokens.step, layer)

    first_GS = probs_GSE.argmax(dim=-1)
    first_gate_GS = probs_GSE.gather(-1, first_GS[..., None]).squeeze(-1)
    position_GS, count_GE = running_positions(real_GS, first_GS, num_experts)
    aux_loss = _auxiliary_loss(spec, count_GE, probs_GSE, real_GS)

    capacity = expert_capacity(spec, group_tokens) if tokens.training else None
    kept_GS = real_GS if capacity is None else real_GS & (position_GS < capacity)

    if num_experts == 1:
        expert, gate = first_GS[..., None], torch.ones_like(first_gate_GS)[..., None]
        position, kept, accepted = position_GS[..., None], kept_GS[..., None], real_GS[..., None]
    else:
        second_GS, second_gate_GS = _runner_up(wide, probs_GSE, first_GS, spec, tokens, key)
        if spec.normalize_gates == "before_drop":
            total_GS = first_gate_GS + second_gate_GS + 1e-9
            first_gate_GS, second_gate_GS = first_gate_GS / total_GS, second_gate_GS / total_GS
        accepted_GS = real_GS & _accepts_second(second_gate_GS, spec, tokens, key)
        counted_GS = real_GS if spec.rejected_second_takes_slot else accepted_GS
        second_position_GS, _ = running_positions(counted_GS, second_GS, num_experts)
        kept_first_GE = count_GE if capacity is None else count_GE.clamp(max=capacity)
        second_position_GS = second_position_GS + kept_first_GE.gather(1, second_GS)
        second_kept_GS = accepted_GS if capacity is None else accepted_GS & (second_position_GS < capacity)

        expert = torch.stack((first_GS, second_GS), -1)
        gate = torch.stack((first_gate_GS, second_gate_GS), -1)
        position = torch.stack((position_GS, second_position_GS), -1)
        kept = torch.stack((kept_GS, second_kept_GS), -1)
        accepted = torch.stack((real_GS, accepted_GS), -1)

    weight = torch.where(kept, gate, 0.0)
    if spec.normalize_gates == "after_drop" and num_experts > 1:
        total = weight.sum(-1, keepdim=True)
        weight = weight / torch.where(total > 0, total, 1.0)

    num_choices = real_GS.sum() * expert.shape[-1]
    share_of = num_choices.clamp(min=1).to(wide.dtype)
    return _routing(
        expert.flatten(0, 1),
        weight.flatten(0, 1),
        kept.flatten(0, 1),
        position.flatten(0, 1),
        num_groups=num_groups,
        num_experts=num_experts,
        capacity=capacity,
        aux_loss=aux_loss,
        z_loss=_z_loss(wide, real_GS),
        rejected=(num_choices - accepted.sum()) / share_of,
        dropped=(accepted & ~kept).sum() / share_of,
        num_choices=num_choices,
    )


def _real(tokens: TokenContext, logits: Tensor) -> Tensor:
    if tokens.padding is None:
        return torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device)
    return ~tokens.padding.view(logits.shape[:2])


def _ids(tokens: TokenContext, logits: Tensor) -> Tensor:
    if tokens.ids is None:
        return torch.arange(logits.shape[0] * logits.shape[1], device=logits.device).view(logits.shape[:2])
    return tokens.ids.view(logits.shape[:2])


def _auxiliary_loss(spec: MoESpec, count_GE: Tensor, probs_GSE: Tensor, real_GS: Tensor) -> Tensor:
    """From first choices before capacity: mean over groups and experts of density · mean probability, times E²
    (the released code), or without that factor (the paper's form, Algorithm 1 line 14)."""
    group_tokens = max(1, probs_GSE.shape[1])
    density_GE = count_GE.to(probs_GSE.dtype) / group_tokens
    proxy_GE = torch.einsum("gse,gs->ge", probs_GSE, real_GS.to(probs_GSE.dtype)) / group_tokens
    if spec.normalize_gates == "after_drop":  # the released code's other mode leaves padding out of the means
        real_share = real_GS.to(probs_GSE.dtype).mean(1, keepdim=True) + 1e-6
        density_GE, proxy_GE = density_GE / real_share, proxy_GE / real_share
    scale = spec.num_experts**2 if spec.aux_form == "e_squared" else 1
    return (density_GE * proxy_GE).sum() * (scale / max(1, count_GE.numel()))


def _z_loss(logits: Tensor, real_GS: Tensor) -> Tensor:
    squares = logits.logsumexp(-1).square()
    return torch.where(real_GS, squares, 0.0).sum() / real_GS.sum().clamp(min=1)


def _runner_up(
    logits: Tensor, probs_GSE: Tensor, first_GS: Tensor, spec: MoESpec, tokens: TokenContext, key: int
) -> tuple[Tensor, Tensor]:
    """The second choice of each token and its probability: the best after the first, or one drawn by Gumbel noise."""
    if spec.second_expert == "sampling" and tokens.training:
        noise = gumbel(fold(key, Purpose.GUMBEL), _ids(tokens, logits), spec.num_experts).to(logits.dtype)
        scores = logits.detach() + noise
    else:
        scores = probs_GSE.detach()
    second_GS = scores.scatter(-1, first_GS[..., None], -torch.inf).argmax(dim=-1)
    return second_GS, probs_GSE.gather(-1, second_GS[..., None]).squeeze(-1)


def _accepts_second(gate_GS: Tensor, spec: MoESpec, tokens: TokenContext, key: int) -> Tensor:
    """Policy `random` keeps a second choice with probability min(1, gate / threshold); the others keep all."""
    if spec.second_expert != "random" or not tokens.training:
        return torch.ones_like(gate_GS, dtype=torch.bool)
    draws = uniform(fold(key, Purpose.SECOND_EXPERT), _ids(tokens, gate_GS))
    return draws < gate_GS.detach() / max(spec.second_expert_threshold, 1e-9)


def _routing(
    expert: Tensor, weight: Tensor, kept: Tensor, position: Tensor, *, num_experts: int, **rest: object
) -> Routing:
    """Flatten the kept choices, ordered by expert, then preference, then token."""
    num_tokens, per_token = expert.shape
    # Dropped choices sort behind the last expert; the stable sort keeps preference and token order within one.
    sort_key = torch.where(kept, expert, num_experts).t().reshape(-1)
    order = sort_key.argsort(stable=True)
    load = torch.bincount(sort_key, minlength=num_experts + 1)[:num_experts]
    num_rows = int(load.sum())
    choice = order[:num_rows]  # index into [K, T]
    token, preference = choice % max(1, num_tokens), choice // max(1, num_tokens)

    row_of_choice = torch.full_like(order, num_rows)
    row_of_choice[choice] = torch.arange(num_rows, device=order.device)
    index = token * per_token + preference
    assignments = Assignments(
        token=token,
        expert=sort_key[choice],
        weight=weight.reshape(-1)[index],
        position=position.reshape(-1)[index],
        row_of_choice=row_of_choice.view(per_token, num_tokens).t(),
    )
    return Routing(assignments, expert, weight, kept, position, load=load, **rest)  # type: ignore[arg-type]

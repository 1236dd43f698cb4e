"""Check of the kernels on a device against plain operations of torch."""

from collections.abc import Callable

import torch
from torch import Tensor

from moe.experts import ExpertWeights, LocalComputation, SegmentProducts, build_activation, feed_forward
from moe.kernels.configs import Configs
from moe.kernels.experts import FusedComputation
from moe.kernels.norm import rms_norm
from moe.kernels.rotary import rotate
from moe.kernels.routing import TopKConstants, route_top_k
from moe.kernels.rows import RowMap
from moe.routing import RoutingState, TokenContext, build_router
from moe.spec import MoESpec


def kernel_error(device: torch.device) -> float:
    """Largest difference between kernels and plain products of small experts in bfloat16, in sums and all gradients,
    relative to the largest value."""
    num_tokens, num_experts, model_dim, hidden_dim = 48, 3, 64, 32
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, device="cpu") / shape[-2] ** 0.5
        return values.to(device, torch.bfloat16).requires_grad_()

    x, weight = leaf(num_tokens, model_dim), leaf(num_tokens, 2)
    w_in, w_gate = leaf(num_experts, model_dim, hidden_dim), leaf(num_experts, model_dim, hidden_dim)
    w_out = leaf(num_experts, hidden_dim, model_dim)
    token = torch.arange(num_tokens, device=device)
    expert = torch.stack((token % num_experts, (token + 1) % num_experts), dim=1)
    choice = expert.reshape(-1).argsort(stable=True)
    counts = [2 * num_tokens // num_experts] * num_experts

    activation = build_activation("swiglu")
    weights, plain = ExpertWeights(w_in, w_out, w_gate), LocalComputation(counts, activation, SegmentProducts())
    rows = feed_forward(x[choice // 2], weight.reshape(-1)[choice], weights, plain)
    plain_sums = torch.zeros_like(x).index_add(0, choice // 2, rows)
    row_map = RowMap.from_choices(expert, torch.ones_like(expert, dtype=torch.bool), num_experts)
    configs = Configs.for_device(device, x.dtype)
    sums = FusedComputation(row_map, activation, configs).run(x, weight, weights)
    leaves, gradient = [x, weight, w_in, w_out, w_gate], torch.ones_like(x)
    results = [sums, *torch.autograd.grad(sums, leaves, gradient)]
    plain_results = [plain_sums, *torch.autograd.grad(plain_sums, leaves, gradient)]
    return max(map(_difference, results, plain_results))


def routing_error(device: torch.device) -> float:
    """The same for routing by softmax and by sigmoid, with ties and padding; infinite if a choice differs."""
    logits = (2 * torch.randn(2, 20, 8, generator=torch.Generator().manual_seed(0), device="cpu")).round().to(
        device
    ) / 2
    padding = torch.zeros(2, 20, dtype=torch.bool, device=device)
    padding[1, 15:] = True
    errors = []
    for scores in ("softmax", "sigmoid"):
        spec = MoESpec(
            num_experts=8, model_dim=8, hidden_dim=8, group_tokens=20, top_k=2, router=f"{scores}_topk",
            bias_update_rate=0.0,
        )  # fmt: skip
        by_kernels, plain = (logits.clone().requires_grad_() for _ in range(2))
        routed = route_top_k(
            by_kernels, padding, TopKConstants(2, scores, renormalizes=True, scaling_factor=1.0, num_best=2)
        )
        routing = build_router(spec)(plain, TokenContext(padding=padding), 0, RoutingState())
        choices = routing.choices.by_token
        assert choices is not None
        if not torch.equal(routed.expert, choices.expert):
            return float("inf")
        gradient = torch.linspace(0, 1, routed.weight.numel(), device=device).view_as(routed.weight)
        loss = (routed.weight * gradient).sum() + routed.aux_loss + routed.z_loss
        plain_loss = (choices.weight * gradient).sum() + routing.aux_loss + routing.z_loss
        (d_kernels,), (d_plain,) = torch.autograd.grad(loss, by_kernels), torch.autograd.grad(plain_loss, plain)
        errors += [_difference(routed.weight, choices.weight), _difference(d_kernels, d_plain)]
        errors.append(_difference(routed.aux_loss, routing.aux_loss))
    return max(errors)


def norm_error(device: torch.device) -> float:
    """The same for RMS norms of bfloat16 heads in strided rows."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 5, 96, generator=generator, device="cpu").to(device, torch.bfloat16)
    weight = torch.randn(48, generator=generator, device="cpu").to(device)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    heads = x[..., :48]
    rate = torch.rsqrt(heads.float().square().mean(-1, keepdim=True) + 1e-6)
    plain = (heads.float() * rate * (1 + weight)).to(x.dtype)
    results = []
    for y in (rms_norm(heads, weight, 1e-6, one_plus=True), plain):
        results.append([y, *torch.autograd.grad(y, (x, weight), torch.ones_like(y))])
    return max(map(_difference, *results))


def rotary_error(device: torch.device) -> float:
    """The same for rotations of both pairings, of a part of each head."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 7, 3, 40, generator=generator, device="cpu").to(device, torch.bfloat16).requires_grad_()
    angles = torch.randn(2, 1, 7, 16, generator=generator, device="cpu").to(device)
    cos, sin, heads = angles.cos(), angles.sin(), x.transpose(1, 2)
    errors = []
    for interleaved in (False, True):
        first, second = heads[..., 0:32:2], heads[..., 1:32:2]
        if not interleaved:
            first, second = heads[..., :16], heads[..., 16:32]
        pairs = (first * cos - second * sin, second * cos + first * sin)
        rotated = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
        plain = torch.cat((rotated.to(x.dtype), heads[..., 32:]), dim=-1)
        y = rotate(heads, cos, sin, interleaved=interleaved)
        weight = torch.linspace(-1, 1, 40, device=device)
        (d_x,), (d_plain,) = torch.autograd.grad((y * weight).sum(), x), torch.autograd.grad((plain * weight).sum(), x)
        errors += [_difference(y, plain), _difference(d_x, d_plain)]
    return max(errors)


ERRORS: dict[str, Callable[[torch.device], float]] = {
    "experts": kernel_error, "routing": routing_error, "norms": norm_error, "rotary": rotary_error,
}  # fmt: skip
"""Check of each kind of kernels (`moe.kernels.support.Kind`)."""


def _difference(result: Tensor, value: Tensor) -> float:
    return ((result - value).abs().max() / value.abs().max()).item()

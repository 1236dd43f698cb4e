"""Check of the kernels on a device against plain operations of torch."""

import torch
from torch import Tensor

from moe.experts import ExpertWeights, LocalComputation, SegmentProducts, build_activation, feed_forward
from moe.kernels.configs import Configs
from moe.kernels.experts import FusedComputation
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


def _difference(result: Tensor, value: Tensor) -> float:
    return ((result - value).abs().max() / value.abs().max()).item()

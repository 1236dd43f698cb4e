"""Check of the kernels on a device against plain operations of torch."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import inf, isnan

import torch
from torch import Tensor

from moe.experts import ExpertWeights, LocalComputation, SegmentProducts, build_activation, feed_forward
from moe.kernels import adamw, norm
from moe.kernels.capacity import Capacity
from moe.kernels.configs import MAX_NORM_WIDTH, ConfigOverrides, Configs
from moe.kernels.experts import FusedComputation
from moe.kernels.rotary import rotate
from moe.kernels.routing import TopKConstants, route_top_k
from moe.kernels.rows import RowMap
from moe.routing import RoutingState, TokenContext, build_router
from moe.spec import MoESpec


def kernel_error(device: torch.device) -> float:
    """Largest difference between kernels and plain products of small experts in bfloat16, in sums and all gradients,
    relative to the largest value."""
    return _error_of_experts(device, {}, num_tokens=48, model_dim=64, hidden_dim=32)


def tuned_kernel_error(device: torch.device, overrides: ConfigOverrides) -> float:
    """The same with autotuned configurations, of experts that are larger than a tile."""
    return _error_of_experts(device, overrides, num_tokens=600, model_dim=320, hidden_dim=288)


def _error_of_experts(
    device: torch.device, overrides: ConfigOverrides, *, num_tokens: int, model_dim: int, hidden_dim: int
) -> float:
    num_experts = 3
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
    configs = Configs.for_device(device, x.dtype).with_overrides(overrides)
    sums = FusedComputation(row_map, activation, configs).run(x, weight, weights)
    leaves, gradient = [x, weight, w_in, w_out, w_gate], torch.ones_like(x)
    results = [sums, *torch.autograd.grad(sums, leaves, gradient)]
    plain_results = [plain_sums, *torch.autograd.grad(plain_sums, leaves, gradient)]
    return _largest(map(_difference, results, plain_results))


def routing_error(device: torch.device) -> float:
    """Largest relative difference of routing by softmax and by sigmoid, with ties, padding and capacity; infinite if a
    choice differs."""
    logits = (2 * torch.randn(2, 20, 8, generator=torch.Generator().manual_seed(0), device="cpu")).round().to(
        device
    ) / 2
    padding = torch.zeros(2, 20, dtype=torch.bool, device=device)
    padding[1, 15:] = True
    errors = []
    for scores, capacity_factor in (("softmax", None), ("sigmoid", None), ("sigmoid", 0.8)):
        spec = MoESpec(
            num_experts=8, model_dim=8, hidden_dim=8, group_tokens=20, top_k=2, router=f"{scores}_topk",
            bias_update_rate=0.0, capacity_factor=capacity_factor,
        )  # fmt: skip
        capacity_rows = spec.routing.capacity(20, 8)
        by_kernels, plain = (logits.clone().requires_grad_() for _ in range(2))
        routed = route_top_k(
            by_kernels, padding, TopKConstants(2, scores, renormalizes=True, scaling_factor=1.0, num_best=2),
            capacity=None if capacity_rows is None else Capacity(2, capacity_rows),
        )  # fmt: skip
        routing = build_router(spec)(plain, TokenContext(padding=padding), 0, RoutingState())
        choices = routing.choices.by_token
        assert choices is not None
        if not (torch.equal(routed.expert, choices.expert) and torch.equal(routed.kept, choices.kept)):
            return float("inf")
        gradient = torch.linspace(0, 1, routed.weight.numel(), device=device).view_as(routed.weight)
        loss = (routed.weight * gradient).sum() + routed.aux_loss + routed.z_loss
        plain_loss = (choices.weight * gradient).sum() + routing.aux_loss + routing.z_loss
        (d_kernels,), (d_plain,) = torch.autograd.grad(loss, by_kernels), torch.autograd.grad(plain_loss, plain)
        errors += [_difference(routed.weight, choices.weight), _difference(d_kernels, d_plain)]
        errors.append(_difference(routed.aux_loss, routing.aux_loss))
    return _largest(errors)


def norm_error(device: torch.device) -> float:
    """Largest relative difference of RMS norms of strided rows in bfloat16 and in float32, of more tiles than the
    backward pass has programs."""
    generator = torch.Generator().manual_seed(0)
    errors = list[float]()
    shapes = (90, 96, torch.bfloat16), (norm.MAX_PARTS + 9, 2048, torch.float32), (9, MAX_NORM_WIDTH, torch.bfloat16)
    for num_rows, width, dtype in shapes:
        x = torch.randn(num_rows, 2 * width, generator=generator, device="cpu").to(device, dtype).requires_grad_()
        weight = torch.randn(width, generator=generator, device="cpu").to(device).requires_grad_()
        rows = x[:, :width]
        rate = torch.rsqrt(rows.float().square().mean(-1, keepdim=True) + 1e-6)
        plain = (rows.float() * rate * (1 + weight)).to(dtype)
        gradient = torch.linspace(-1, 1, width, device=device).to(dtype).expand_as(plain)
        results = []
        for y in (norm.rms_norm(rows, weight, 1e-6, one_plus=True), plain):
            results.append([y, *torch.autograd.grad(y, (x, weight), gradient)])
        errors += map(_difference, *results)
    return _largest(errors)


def rotary_error(device: torch.device) -> float:
    """Largest relative difference of rotations by both pairings, of a part of each head, in both memory orders of heads
    and positions."""
    generator = torch.Generator().manual_seed(0)
    memory = torch.randn(2, 70, 6, 40, generator=generator, device="cpu").to(device, torch.bfloat16).requires_grad_()
    angles = torch.randn(2, 1, 70, 16, generator=generator, device="cpu").to(device)
    cos, sin = angles.cos(), angles.sin()
    gradient = torch.linspace(-1, 1, 40, device=device).to(memory.dtype)
    errors = list[float]()
    for interleaved in (False, True):
        for heads in (memory.transpose(1, 2), memory.transpose(1, 2).contiguous()):
            first, second = heads[..., 0:32:2], heads[..., 1:32:2]
            if not interleaved:
                first, second = heads[..., :16], heads[..., 16:32]
            pairs = (first * cos - second * sin, second * cos + first * sin)
            rotated = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
            plain = torch.cat((rotated.to(memory.dtype), heads[..., 32:]), dim=-1)
            results = []
            for y in (rotate(heads, cos, sin, interleaved=interleaved), plain):
                results.append([y, *torch.autograd.grad(y, memory, gradient.expand_as(y), retain_graph=True)])
            errors += map(_difference, *results)
    return _largest(errors)


def optimizer_error(device: torch.device) -> float:
    """Largest relative difference from torch's AdamW in float64 after three steps, clipped by different factors, of
    tensors of several blocks: of changes of weights and of both moments. Infinite if a narrow copy is wrong, or if
    an update is applied that must not be."""
    generator = torch.Generator().manual_seed(0)

    def tensors() -> list[Tensor]:
        sizes = (2 * adamw.BLOCK + 1, adamw.BLOCK, 5)
        return [torch.randn(size, generator=generator, device="cpu").to(device) for size in sizes]

    weights = tensors()
    first_weights, plain = (
        [weight.double() for weight in weights],
        [weight.double().requires_grad_() for weight in weights],
    )
    moments1, moments2 = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    copies = [weight.bfloat16() for weight in weights[:2]]
    optimizer = torch.optim.AdamW(plain, lr=0.1, betas=(0.9, 0.9999), eps=1e-8, weight_decay=0.1)
    blocks = adamw.BlockTable(weights)
    for step, clip_factor in enumerate((0.3, 1.0, 0.01), 1):
        gradients, factor = tensors(), torch.tensor(clip_factor, dtype=torch.float64, device=device)
        for weight, gradient in zip(plain, gradients, strict=True):
            weight.grad = gradient.double() * factor
        optimizer.step()
        factors = adamw.AdamWFactors.of_step(step, lr=0.1, beta1=0.9, beta2=0.9999, eps=1e-8, weight_decay=0.1)
        operands = adamw.AdamWTensors(weights, gradients, moments1, moments2, [*copies, None])
        masked_operands = replace(operands, gradients=[torch.full_like(gradient, 9.0) for gradient in gradients])
        found_inf = torch.ones((), device=device)
        adamw.launch_adamw(masked_operands, blocks, factors, factor, found_inf)
        adamw.launch_adamw(operands, blocks, factors, factor, 1 - found_inf)
    states = [optimizer.state[weight] for weight in plain]
    pairs = [
        *((weight - first, exact.detach() - first)
          for weight, exact, first in zip(weights, plain, first_weights, strict=True)),
        *zip(moments1, (state["exp_avg"] for state in states), strict=True),
        *zip(moments2, (state["exp_avg_sq"] for state in states), strict=True),
    ]  # fmt: skip
    is_rounded = all(
        torch.allclose(copy.float(), weight, rtol=2**-7, atol=0.0)
        for copy, weight in zip(copies, weights, strict=False)
    )
    return _largest(_difference(*pair) for pair in pairs) if is_rounded else inf


CHECKS: dict[str, Callable[[torch.device], float]] = {
    "experts": kernel_error, "routing": routing_error, "norms": norm_error, "rotary": rotary_error,
    "optimizer": optimizer_error,
}  # fmt: skip
"""Check of each kind of kernels (`moe.kernels.support.KernelKind`)."""


def _largest(errors: Iterable[float]) -> float:
    """The largest error; infinite if one is no number."""
    return max(inf if isnan(error) else error for error in errors)


def _difference(result: Tensor, value: Tensor) -> float:
    return ((result - value).abs().max() / value.abs().max()).item()

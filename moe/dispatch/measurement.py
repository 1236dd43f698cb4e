"""Measured cost of an expert layer by the fused kernels, autotuned, and by rows."""

import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moe.dispatch.dispatcher import LocalDispatcher
from moe.experts import FUSED, Cost, Costs, Experts, build_activation, measure
from moe.kernels.support import MAX_ERROR, has_fast_products, has_kernels
from moe.parallel.accelerator import accelerator
from moe.routing.choices import SortedChoices

if TYPE_CHECKING:
    from moe.kernels.configs import ConfigOverrides

_PER_TOKEN = 2
_ROUNDS = 5
_MAX_TUNING_S = 90.0
_MIN_GAIN = 0.01
"""Smallest relative speed-up for which a candidate replaces the current configuration."""


def measure_with_kernels(w_in: Tensor) -> Costs:
    """`moe.experts.measure`, with a cost `FUSED` if a layer of gated experts like `w_in` `[E, M, H]` is faster by the
    kernels, autotuned, than by rows and the fastest of the other backends."""
    costs = measure(w_in)
    if not has_kernels(w_in, "experts") or not has_fast_products(w_in.dtype):
        return costs
    num_rows = 512 * w_in.shape[0]
    try:
        rows_s, fused_s = _layer_seconds(w_in, num_rows, (costs, {FUSED: Cost(0.0, 0.0)}))
        overrides, fused_s = _autotune(w_in, num_rows, fused_s)
    except torch.OutOfMemoryError:  # six matrices of all experts; training holds them one layer at a time
        return costs
    return {**costs, FUSED: Cost(0.0, fused_s / num_rows, config_overrides=overrides)} if fused_s < rows_s else costs


def _autotune(w_in: Tensor, num_rows: int, default_s: float) -> tuple["ConfigOverrides", float]:
    """(fastest configurations that differ from the defaults, seconds per layer).

    Kernels are tuned one after another, each with the best configurations so far; no candidate starts after
    `_MAX_TUNING_S`. Skipped are candidates that fail to compile or give wrong results, and those with TMA if it cannot
    load such weights.
    """
    from triton.errors import TritonError

    from moe.kernels.check import tuned_kernel_error
    from moe.kernels.configs import Config, Configs
    from moe.kernels.descriptors import is_loadable

    best: tuple[ConfigOverrides, float] = ({}, default_s)
    deadline = time.monotonic() + _MAX_TUNING_S
    w_out = w_in.new_empty(1, *w_in.shape[:0:-1])
    has_tma = is_loadable(w_in) and is_loadable(w_out)
    for kernel, fields in Configs.candidates(w_in.device, w_in.dtype):
        if time.monotonic() > deadline:
            break
        if Config.from_fields(fields).uses_tma and not has_tma:
            continue
        overrides = {**best[0], kernel: fields}
        ways = tuple({FUSED: Cost(0.0, 0.0, config_overrides=tried)} for tried in (best[0], overrides))
        try:
            best_s, candidate_s = _layer_seconds(w_in, num_rows, ways)
            if candidate_s < (1 - _MIN_GAIN) * best_s and tuned_kernel_error(w_in.device, overrides) < MAX_ERROR:
                best = overrides, candidate_s
        except (torch.AcceleratorError, torch.OutOfMemoryError):
            raise
        except (TritonError, RuntimeError):  # compilation failed, or too much shared memory
            continue
    return best


def _layer_seconds(w_in: Tensor, num_rows: int, ways: tuple[Costs, ...]) -> list[float]:
    """Shortest of `_ROUNDS` times of a forward and backward pass of `num_rows` rows, by each of several costs. They
    take turns, so background load slows all of them."""
    num_experts, model_dim, _ = w_in.shape
    experts = Experts(build_activation("swiglu"))
    experts.w_in, experts.w_gate = nn.Parameter(w_in), nn.Parameter(w_in.clone())
    experts.w_out = nn.Parameter(w_in.transpose(1, 2).contiguous())
    num_tokens = max(1, num_rows // _PER_TOKEN)
    x = w_in.new_ones(num_tokens, model_dim, requires_grad=True)
    expert = torch.arange(num_tokens * _PER_TOKEN, device=w_in.device).view(num_tokens, _PER_TOKEN) % num_experts
    weight = torch.full(expert.shape, 1 / _PER_TOKEN, device=w_in.device, requires_grad=True)
    choices = SortedChoices(expert, weight, torch.ones_like(expert, dtype=torch.bool), num_experts)

    def once(costs: Costs) -> float:
        experts.costs = costs
        accelerator(w_in.device).synchronize()
        began = time.perf_counter()
        rows, scale, computation, combiner = LocalDispatcher()(x, choices, experts)
        combiner.combine(experts(rows, scale, computation)).backward(x.detach())
        accelerator(w_in.device).synchronize()
        experts.zero_grad()
        return time.perf_counter() - began

    rounds = [[once(costs) for costs in ways] for _ in range(1 + _ROUNDS)]
    return [min(seconds) for seconds in zip(*rounds[1:], strict=True)]

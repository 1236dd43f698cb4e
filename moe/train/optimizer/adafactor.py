"""Adafactor with per-expert statistics: updates do not depend on the layout."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe.parallel import Layout, LocalParameter, ParameterShard, collective
from moe.spec import AdafactorSpec
from moe.train.optimizer.found_inf import scale_, select
from moe.train.optimizer.parameter_groups import group_parameters, param_groups


class Adafactor(torch.optim.Optimizer):
    """Adafactor (Shazeer & Stern 2018, arXiv 1804.04235, algorithm 4) without first moment.

    As in the GShard paper: beta1 = 0, constant beta2 with the bias correction of section 7.1, no scaling by parameter
    size, updates clipped to a root mean square of `clip_threshold` (section 6).

    Second moments are factored into row and column means for matrices, unfactored for vectors. An expert parameter
    [E, A, B] is E matrices with separate statistics and clipping, in one batched pass. Means of sharded matrices are
    over the full matrix. torch's Adafactor treats the local tensor as one matrix, so its updates depend on the
    layout.
    """

    found_inf: Tensor | None = None
    """Scalar on the device: 1 if `step` must change nothing."""

    def __init__(self, spec: AdafactorSpec, parameters: list[LocalParameter], layout: Layout) -> None:
        self._spec, self._layout, self._groups = spec, layout, group_parameters(spec, parameters)
        super().__init__(param_groups(spec, self._groups), {"lr": spec.peak_lr})
        for parameter in parameters:
            self.state[parameter.local] = _first_state(parameter.local, parameter.part)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters in place from their gradients. Collective."""
        for parameters, group in zip(self._groups, self.param_groups, strict=True):
            for parameter in parameters:
                self._update(parameter.local, parameter.part, group["lr"], group["weight_decay"])

    def _update(self, parameter: nn.Parameter, part: ParameterShard, lr: float, weight_decay: float) -> None:
        spec, first_dim = self._spec, 1 if part.of_experts else 0  # earlier dims index matrices
        state = self.state[parameter]
        state["step"] += 1
        step = int(state["step"])
        # Section 7.1: bias-corrected decay of an exponential mean that starts at zero.
        weight = (1 - spec.beta2) / (1 - spec.beta2**step)
        # Experts without tokens have zero gradients, so that their statistics decay too.
        assert parameter.grad is not None, "reduce_gradients gives every parameter a gradient"
        found_inf, gradient = self.found_inf, parameter.grad
        squares = gradient.square().add_(spec.eps)
        if "rows" in state:
            last, row_dims = squares.dim() - 1, tuple(range(first_dim, squares.dim() - 1))
            new_rows, new_columns = self._mean(squares, (last,), part), self._mean(squares, row_dims, part)
            rows = state["rows"].lerp_(select(found_inf, state["rows"], new_rows), weight)
            columns = state["columns"].lerp_(select(found_inf, state["columns"], new_columns), weight)
            matrix_mean = self._mean(rows, row_dims, part)
            row_scale = (rows / _spread(matrix_mean, rows, first_dim)).rsqrt_()
            update = torch.mul(gradient, row_scale[..., None], out=squares)
            update.mul_(_spread(columns.rsqrt(), update, first_dim))
        else:
            moments = state["moments"].lerp_(select(found_inf, state["moments"], squares), weight)
            update = torch.mul(gradient, moments.rsqrt(), out=squares)
        rms = self._mean(update.square(), tuple(range(first_dim, update.dim())), part).sqrt()
        update.mul_(_spread(lr / (rms / spec.clip_threshold).clamp_(min=1.0), update, first_dim))
        if weight_decay:
            scale_(parameter, 1 - lr * weight_decay, found_inf)
        parameter.sub_(update if found_inf is None else update.masked_fill_(found_inf != 0, 0.0))

    def _mean(self, tensor: Tensor, dims: tuple[int, ...], part: ParameterShard) -> Tensor:
        """Mean over dims of the full tensor; `tensor` is this rank's shard of it."""
        total = tensor.sum(dims)
        for axis, dim in part.splits:
            if dim in dims:
                with collective(f"all-reduce of Adafactor's statistics over {axis}"):
                    dist.all_reduce(total, group=self._layout.group(axis))
        return total / math.prod(part.shape[dim] for dim in dims)


def _spread(values: Tensor, target: Tensor, first_dim: int) -> Tensor:
    """Reshape `values` (per matrix, or per column of each) to broadcast over `target`."""
    missing = target.dim() - values.dim()
    return values.view([*values.shape[:first_dim], *[1] * missing, *values.shape[first_dim:]])


def _first_state(parameter: nn.Parameter, part: ParameterShard) -> dict[str, Tensor]:
    first_dim = 1 if part.of_experts else 0
    state = {"step": torch.zeros((), dtype=torch.float32)}
    if parameter.dim() - first_dim >= 2:
        state["rows"] = parameter.new_zeros(parameter.shape[:-1])
        state["columns"] = parameter.new_zeros(*parameter.shape[:first_dim], parameter.shape[-1])
    else:
        state["moments"] = torch.zeros_like(parameter)
    return state


def slot_part(slot: str, part: ParameterShard) -> ParameterShard:
    """Shard of an optimizer slot, from the shard of its parameter."""
    last = len(part.shape) - 1
    if slot == "rows":
        return ParameterShard(
            part.shape[:-1], tuple(split for split in part.splits if split[1] < last), part.of_experts
        )
    if slot == "columns":
        first_dim = 1 if part.of_experts else 0
        splits = tuple(
            (axis, first_dim if dim == last else dim) for axis, dim in part.splits if dim == last or dim < first_dim
        )
        return ParameterShard(torch.Size((*part.shape[:first_dim], part.shape[-1])), splits, part.of_experts)
    return part

"""Adafactor with statistics for each expert, so that an update never depends on the layout."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from moe.spec import AdafactorSpec


class Adafactor(torch.optim.Optimizer):
    """Adafactor (Shazeer & Stern 2018, arXiv 1804.04235, algorithm 4) without first moment.

    As the GShard paper uses it: beta1 = 0, a constant beta2 with the bias correction of section 7.1, no
    scaling by the parameter's size, updates clipped to a root mean square of `clip_threshold` (section 6).

    Second moments of matrices are factored into row and column means; vectors keep them whole. An expert
    parameter [E_local, M, H] is E_local matrices: each has statistics and a clip of its own, all computed
    in one batched pass. torch's own treats the local tensor as one, so that its update depends on how many
    experts share a rank.
    """

    def __init__(
        self, spec: AdafactorSpec, dense: Iterable[nn.Parameter], experts: Iterable[nn.Parameter]
    ) -> None:
        groups = [{"params": list(dense), "experts": False}, {"params": list(experts), "experts": True}]
        super().__init__([group for group in groups if group["params"]], {"lr": spec.peak_lr})
        self._spec = spec
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = _first_state(parameter, group["experts"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter from its gradient, in place."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._update(parameter, self.state[parameter], group["lr"], group["experts"])

    def _update(self, parameter: nn.Parameter, state: dict[str, Tensor], lr: float, experts: bool) -> None:
        spec = self._spec
        state["step"] += 1
        step = int(state["step"])
        # Section 7.1: the decay that makes an exponential mean from zero unbiased, without a division later.
        weight = (1 - spec.beta2) / (1 - spec.beta2**step)
        grad = _stacked(parameter.grad, experts)  # [stack, rows, columns] or [stack, length]
        squared = grad.square().add_(spec.eps)
        if grad.ndim == 3:
            rows = state["rows"].lerp_(squared.mean(dim=2), weight)
            columns = state["columns"].lerp_(squared.mean(dim=1), weight)
            row_scale = (rows / rows.mean(dim=1, keepdim=True)).rsqrt_()
            update = torch.mul(grad, row_scale[:, :, None], out=squared).mul_(columns.rsqrt()[:, None, :])
        else:
            update = torch.mul(grad, state["moments"].lerp_(squared, weight).rsqrt(), out=squared)
        flat = update.flatten(start_dim=1)
        rms = torch.linalg.vector_norm(flat, dim=1) / flat.shape[1] ** 0.5
        flat.mul_((lr / (rms / spec.clip_threshold).clamp_(min=1.0))[:, None])
        if spec.weight_decay:
            parameter.mul_(1 - lr * spec.weight_decay)
        parameter.sub_(update.view_as(parameter))


def _stacked(tensor: Tensor | None, experts: bool) -> Tensor:
    """What has statistics of its own, stacked: matrices [stack, rows, columns] or vectors [stack, length]."""
    # An expert without tokens has zeros, so that its statistics decay as everyone's do.
    assert tensor is not None, "reduce_gradients gives every parameter a gradient"
    stacked = tensor if experts else tensor[None]
    if stacked.ndim <= 2:
        return stacked.reshape(stacked.shape[0], -1)
    return stacked.reshape(*stacked.shape[:2], -1)


def _first_state(parameter: nn.Parameter, experts: bool) -> dict[str, Tensor]:
    shape = _stacked(parameter.detach(), experts).shape
    state = {"step": torch.zeros((), dtype=torch.float32)}
    if len(shape) == 3:
        # An expert's slots keep the expert dimension first, which is how a checkpoint shards them.
        state["rows"] = parameter.new_zeros(shape[:2])
        state["columns"] = parameter.new_zeros(shape[0], shape[2])
    else:
        state["moments"] = parameter.new_zeros(shape)
    return state

"""Muon for hidden matrices, with AdamW for the other parameters."""

import math
from typing import Any

import torch
from torch import Tensor

from moe.parallel import Layout, LocalParameter
from moe.parallel.whole_matrices import WholeMatrices
from moe.spec import MuonSpec
from moe.train.optimizer.found_inf import scale_, select
from moe.train.optimizer.parameter_groups import group_parameters, param_groups

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic polynomial, whose slope at 0 is the largest for which singular values stay around 1."""
_MIN_NORM = 1e-7
_ELEMENTS_AT_ONCE = {"cpu": 1 << 20}
"""Elements orthogonalized at once, by device: on a CPU, what fits its caches."""


class Muon(torch.optim.Optimizer):
    """Muon (https://kellerjordan.github.io/posts/muon/), scaled as in Moonlight (arXiv 2502.16982, section 2.2).

    The momentum of each hidden matrix is replaced by its nearest semi-orthogonal matrix, and scaled by 0.2 · √(larger
    side), which gives it AdamW's usual root mean square. Each expert's matrix is one by itself, and whole: shards are
    collected, and the work is spread over the ranks, so updates do not depend on the layout. Equal to torch's Muon with
    `adjust_lr_fn="match_rms_adamw"`.
    """

    found_inf: Tensor | None = None
    """Scalar on the device: 1 if `step` must change nothing."""

    def __init__(
        self, spec: MuonSpec, matrices: list[LocalParameter], adamw: torch.optim.Optimizer, layout: Layout
    ) -> None:
        """`adamw` updates the other parameters."""
        self._spec, self._adamw, self._groups = spec, adamw, group_parameters(spec, matrices)
        super().__init__(param_groups(spec, self._groups), {"lr": spec.peak_lr})
        for parameter in matrices:
            self.state[parameter.local] = {"momentum_buffer": torch.zeros_like(parameter.local)}
        self._matrices = WholeMatrices(matrices, layout)
        self._group_of = {
            parameter.name: group
            for parameters, group in zip(self._groups, self.param_groups, strict=True) for parameter in parameters
        }  # fmt: skip
        self.param_groups += adamw.param_groups
        self.state.update(adamw.state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters in place from their gradients. Collective."""
        self._adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
        self._adamw.step()
        for parameter, update in self._matrices.map(self._momentum, self._orthogonalize):
            group, (rows, columns) = self._group_of[parameter.name], parameter.part.shape[-2:]
            scale_(parameter.local, 1 - group["lr"] * group["weight_decay"], self.found_inf)
            if self.found_inf is not None:
                update.masked_fill_(self.found_inf != 0, 0.0)
            parameter.local.add_(update, alpha=-0.2 * math.sqrt(max(rows, columns)) * group["lr"])

    def _momentum(self, parameter: LocalParameter) -> Tensor:
        """Nesterov's momentum after this step's gradient, in the dtype to orthogonalize in: bfloat16, except for
        weights in float64."""
        gradient, factor = parameter.local.grad, self._spec.momentum
        assert gradient is not None, "reduce_gradients gives every parameter a gradient"
        momentum: Tensor = self.state[parameter.local]["momentum_buffer"]
        momentum.lerp_(select(self.found_inf, momentum, gradient), 1 - factor)
        update = gradient.lerp(momentum, factor) if self._spec.nesterov else momentum
        dtype = torch.float64 if update.dtype == torch.float64 else torch.bfloat16
        return update.to(dtype, copy=True, memory_format=torch.contiguous_format)

    def _orthogonalize(self, updates: Tensor) -> None:
        orthogonalize_(updates, self._spec.ns_steps)


def orthogonalize_(matrices_NRC: Tensor, num_steps: int) -> None:
    """Replace each matrix USVᵀ by an approximation of UVᵀ, by `num_steps` of a Newton-Schulz iteration in its dtype."""
    num_rows, num_columns = matrices_NRC.shape[-2:]
    at_once = max(1, _ELEMENTS_AT_ONCE.get(matrices_NRC.device.type, 1 << 26) // (num_rows * num_columns))
    for x in matrices_NRC.split(at_once):
        # The smaller side first, for the smaller product X Xᵀ.
        wide = x.mT if num_rows > num_columns else x
        wide.copy_(_newton_schulz(wide.contiguous(), num_steps))


def _newton_schulz(x: Tensor, num_steps: int) -> Tensor:
    """Iterate on matrices [N, rows, columns]. Products are written to the same few tensors, since new ones for each
    would cost a CPU up to a tenth of the time."""
    a, b, c = _COEFFICIENTS
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp_(min=_MIN_NORM)
    next_x, gram = torch.empty_like(x), x.new_empty(*x.shape[:-1], x.shape[-2])
    polynomial = torch.empty_like(gram)
    for _ in range(num_steps):
        torch.bmm(x, x.mT, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        torch.baddbmm(x, polynomial, x, beta=a, out=next_x)
        x, next_x = next_x, x
    return x

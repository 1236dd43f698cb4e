"""The experts of one layer that live on this rank."""

import torch
from torch import Tensor, nn

from moe.experts.activation import ACTIVATIONS
from moe.experts.choice import Costs, cheapest
from moe.experts.feed_forward import Work, feed_forward
from moe.experts.travelling import Journey, travelling_feed_forward
from moe.experts.weights import ExpertWeights
from moe.parallel import Layout, new_parameter
from moe.spec import MoESpec


class Experts(nn.Module):
    """This rank's share of a layer's experts: two matrices and an activation each (GShard, section 2.1), or three
    where the activation has a gate (arXiv 2002.05202)."""

    w_gate: nn.Parameter | None
    b_in: nn.Parameter | None
    b_out: nn.Parameter | None
    b_gate: nn.Parameter | None

    def __init__(
        self,
        spec: MoESpec,
        layout: Layout,
        *,
        name: str,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.activation = spec.activation
        self.costs: Costs = {}
        """What each backend takes for these experts; where it was not measured, one product an expert."""
        self.recompute = layout.recompute == "selective"
        """Whether hidden states are made again in the backward pass, from the rows alone."""
        gated, width, hidden = ACTIVATIONS[spec.activation].gated, spec.model_dim, spec.hidden_dim

        def weights(shape: tuple[int, ...], std: float, parameter: str, hidden_at: int) -> nn.Parameter:
            return new_parameter(
                (spec.num_experts, *shape), std, layout, name=f"{name}.{parameter}", seed=seed, dtype=dtype,
                cuts={"expert": 0, "expert_tensor": hidden_at}, of_experts=True,
            )  # fmt: skip

        self.w_in = weights((width, hidden), width**-0.5, "w_in", 2)
        self._shape_here = self.w_in.shape
        self.w_gate = weights((width, hidden), width**-0.5, "w_gate", 2) if gated else None
        self.w_out = weights((hidden, width), hidden**-0.5, "w_out", 1)
        self.b_in = weights((hidden,), 0.0, "b_in", 1) if spec.expert_bias else None
        self.b_gate = weights((hidden,), 0.0, "b_gate", 1) if spec.expert_bias and gated else None
        # Each part of an expert adds some columns of the last bias, as long as all parts are added up.
        self.b_out = weights((width,), 0.0, "b_out", 1) if spec.expert_bias else None
        self._b_out_first = layout.index("expert_tensor") * (width // layout.degree("expert_tensor"))

    def padded(self, counts: list[int]) -> list[int]:
        """How many rows the experts here would rather have than these; rows that fill up have a weight of zero."""
        return cheapest(self.costs, counts).padded(counts)

    def forward(self, rows: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        """`[n, M]` for `rows` `[n, M]` sorted by expert, `counts[i]` of them for the i-th expert here: what the experts
        give, times `weight` `[n]`."""
        return feed_forward(rows, weight, self.weights, self._work_on(counts))

    def travelling(self, rows: Tensor, weight: Tensor, journey: Journey) -> Tensor:
        """`[n, M]`: what the experts of all ranks of the journey give for `rows` `[n, M]`, times `weight` `[n]`."""
        return travelling_feed_forward(
            rows, weight, self.weights, journey, lambda counts: self._work_on(self.padded(counts))
        )

    def _work_on(self, counts: list[int]) -> Work:
        return Work(counts, ACTIVATIONS[self.activation], cheapest(self.costs, counts), self.recompute)

    def like_w_in(self, dtype: torch.dtype) -> Tensor:
        """A tensor as `w_in` `[E, M, H]` of the experts here is when they are multiplied, with any values."""
        return torch.ones(self._shape_here, dtype=dtype, device=self.w_in.device)

    @property
    def weights(self) -> ExpertWeights:
        """All weights, as they are kept."""
        tensors = (self.w_in, self.w_out, self.w_gate, self.b_in, self.b_out, self.b_gate)
        return ExpertWeights.of(tensors, self._b_out_first)

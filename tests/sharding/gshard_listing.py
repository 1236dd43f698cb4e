"""The paper's Algorithms 1 and 2 (arXiv 2006.16668) in einsum, with or without the three annotations of its listing."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe import sharding


def top2_gating(gates_GSE: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """(combine weights `[G, S, E, C]`, dispatch mask of that shape, auxiliary loss): Algorithm 1 for all groups,
    with second experts always taken."""
    num_experts = gates_GSE.shape[-1]
    first_GS = gates_GSE.argmax(-1)
    mask_1 = functional.one_hot(first_GS, num_experts).to(gates_GSE.dtype)
    rest = gates_GSE * (1 - mask_1)
    mask_2 = functional.one_hot(rest.argmax(-1), num_experts).to(gates_GSE.dtype)
    g1, g2 = (gates_GSE * mask_1).sum(-1), (gates_GSE * mask_2).sum(-1)
    g1, g2 = g1 / (g1 + g2 + 1e-9), g2 / (g1 + g2 + 1e-9)
    aux = (mask_1.mean(1) * gates_GSE.mean(1)).mean()
    place_1 = (mask_1.cumsum(1) - mask_1) * mask_1
    mask_1 = mask_1 * (place_1 < capacity)
    place_2 = (mask_2.cumsum(1) - mask_2 + mask_1.sum(1, keepdim=True)) * mask_2
    mask_2 = mask_2 * (place_2 < capacity)
    combine = torch.zeros((), dtype=gates_GSE.dtype)
    for gate, mask, place in ((g1, mask_1, place_1), (g2, mask_2, place_2)):
        slot_GS = (place * mask).sum(-1).long()
        slots = functional.one_hot(slot_GS, max(capacity, place.shape[1] * 2))[..., :capacity].to(gate.dtype)
        combine = combine + torch.einsum("GS,GSE,GSC->GSEC", gate, mask, slots)
    return combine, (combine != 0).to(gates_GSE.dtype), aux


class PaperLayer(nn.Module):
    """Algorithm 2."""

    def __init__(self, model_dim: int, hidden_dim: int, num_experts: int, capacity: int, is_annotated: bool) -> None:
        super().__init__()
        self.wg = nn.Parameter(torch.empty(model_dim, num_experts))
        self.wi = nn.Parameter(torch.empty(num_experts, model_dim, hidden_dim))
        self.wo = nn.Parameter(torch.empty(num_experts, hidden_dim, model_dim))
        self.capacity, self.is_annotated = capacity, is_annotated
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.wg, self.wi, self.wo):
            nn.init.normal_(weight, std=weight.shape[-2] ** -0.5)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        wg = self.wg
        if self.is_annotated:
            inputs = sharding.split(inputs, 0)
            wg = sharding.replicate(wg)
        gates = torch.softmax(torch.einsum("GSM,ME->GSE", inputs, wg), -1)
        combine, dispatch, aux = top2_gating(gates, self.capacity)
        expert_inputs = torch.einsum("GSEC,GSM->EGCM", dispatch, inputs)
        if self.is_annotated:
            expert_inputs = sharding.split(expert_inputs, 0)
        hidden_states = torch.relu(torch.einsum("EGCM,EMH->EGCH", expert_inputs, self.wi))
        outputs = torch.einsum("EGCH,EHM->GECM", hidden_states, self.wo)
        return torch.einsum("GSEC,GECM->GSM", combine, outputs), aux


class PaperModel(nn.Module):
    """Layers in residuals, and a loss."""

    def __init__(self, num_layers: int = 1, is_annotated: bool = False, model_dim: int = 16, hidden_dim: int = 64,
                 num_experts: int = 8, capacity: int = 4) -> None:  # fmt: skip
        super().__init__()
        self.layers = nn.ModuleList(
            PaperLayer(model_dim, hidden_dim, num_experts, capacity, is_annotated) for _ in range(num_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for layer in self.layers:
            y, aux = layer(x)
            x, total = x + y, total + aux
        return x.square().mean() + 0.01 * total

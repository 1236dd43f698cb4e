"""Everything a run must remember between steps, by names that no layout changes."""

import torch
from torch import Tensor, nn

from moe.parallel import Layout, LocalParameter, to_global
from moe.train.optimizer.build import moments


def run_tensors(
    model: nn.Module, parameters: list[LocalParameter], optimizer: torch.optim.Optimizer, layout: Layout
) -> dict[str, Tensor]:
    """`model.<parameter>` and `optimizer.<slot>.<parameter>`: DTensors of what is spread over ranks, the rest plain.

    They share memory with the model and the optimizer: loading into them in place restores the run.
    """
    tensors = {f"model.{each.name}": to_global(each.local, each.part, layout) for each in parameters}
    tensors |= {f"model.{name}": buffer for name, buffer in model.named_buffers()}
    for name, slot, tensor, part in moments(optimizer, parameters):
        tensors[f"optimizer.{slot}.{name}"] = to_global(tensor, part, layout)
    return tensors

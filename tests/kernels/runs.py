"""Training by the kernels, and choice of an optimizer, on the ranks of a test."""

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from moe.kernels.experts import FusedComputation
from moe.parallel import Layout, local_parameters
from moe.spec import AdamWSpec, TrainSpec
from moe.train.optimizer import fused_adamw
from moe.train.optimizer.build import build_optimizer
from tests.kernels.enabled import kernels_everywhere
from tests.parity.trajectory import Degrees, Model, Shape, run


def run_by_kernels(
    model: Model, train: TrainSpec, degrees: Degrees, num_steps: int
) -> tuple[list[dict[str, Any]], int]:
    """(records of a run, number of passes of experts by the kernels)."""
    num_passes, passes = 0, FusedComputation.forward_pass

    def counted(*arguments: Any, **keywords: Any) -> Any:
        nonlocal num_passes
        num_passes += 1
        return passes(*arguments, **keywords)

    FusedComputation.forward_pass = counted  # type: ignore[method-assign]
    try:
        with kernels_everywhere():
            return run(model, train, degrees, Shape(), num_steps), num_passes
    finally:
        FusedComputation.forward_pass = passes  # type: ignore[method-assign]


def optimizer_class_name(num_with_kernels: int) -> str:
    """Class of the optimizer of a replicated parameter, where only the first ranks have kernels."""
    layout = Layout.build(Degrees(data=2).plan(num_groups=2))
    module = nn.Linear(2, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_adamw, "has_kernels", lambda *_: dist.get_rank() < num_with_kernels)
        optimizer = build_optimizer(AdamWSpec(name="adamw"), local_parameters(module), layout)
    layout.close()
    return type(optimizer).__name__

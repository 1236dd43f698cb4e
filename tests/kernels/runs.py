"""Training by the kernels, on the ranks of a test."""

from typing import Any

from moe.kernels.experts import FusedComputation
from moe.spec import TrainSpec
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

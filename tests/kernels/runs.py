"""Training by the kernels, and checks of them, on the ranks of a test."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from moe.dispatch.exchange import SortedChunk
from moe.kernels import support
from moe.kernels.experts import FusedComputation
from moe.kernels.support import KernelKind
from moe.spec import TrainSpec
from tests.kernels.cases import DEVICE
from tests.kernels.enabled import kernels_everywhere
from tests.parity.trajectory import Degrees, Model, Shape, run


def run_by_kernels(
    model: Model, train: TrainSpec, degrees: Degrees, num_steps: int
) -> tuple[list[dict[str, Any]], int]:
    """Records of a run whose experts no other computation computes, and the number of forward passes by the kernels.

    The optimizer's kernel does not store clipped gradients: their recorded norms are clipped here.
    """
    num_passes, forward_pass = 0, FusedComputation.forward_pass

    def counted(*arguments: Any, **keywords: Any) -> Any:
        nonlocal num_passes
        num_passes += 1
        return forward_pass(*arguments, **keywords)

    def refuse(*_: Any) -> Any:
        raise AssertionError("rows were sorted")

    with pytest.MonkeyPatch.context() as patch, kernels_everywhere():
        patch.setattr(FusedComputation, "forward_pass", counted)
        patch.setattr(SortedChunk, "from_arriving", refuse)
        records = run(model, train, degrees, Shape(), num_steps)
    clip_recorded_gradients(records, train)
    return records, num_passes


def clip_recorded_gradients(records: list[dict[str, Any]], train: TrainSpec) -> None:
    assert train.clip_norm is not None
    for record in records:
        factor = min(1.0, train.clip_norm / (record["grad_norm"] + 1e-6))
        record["gradients"] = {name: factor * norm for name, norm in record["gradients"].items()}


def verdict_in_checkpoint(kind: KernelKind) -> tuple[str | None, bool]:
    """(reason against a kind of kernels, whether gradients are finite), if the first check is in a checkpoint."""
    reasons = []

    def function(x: torch.Tensor) -> torch.Tensor:
        reasons.append(support._failure_of(torch.device(DEVICE), kind) if not reasons else reasons[0])
        return x.sin().exp()

    x = torch.ones(3, requires_grad=True)
    checkpoint(function, x, use_reentrant=False).sum().backward()
    assert x.grad is not None
    return reasons[0], bool(x.grad.isfinite().all())


def disabled_kinds(failing_rank: int, kind: KernelKind) -> list[str]:
    """Kinds of kernels that are disabled after a check of all ranks, if one fails on one rank."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(support, "_DISABLED", set())
        patch.setattr(support, "kernels_are_correct", lambda _, name: (dist.get_rank(), name) != (failing_rank, kind))
        support.check_kernels(torch.device("cuda", 0))
        return [*support._DISABLED]

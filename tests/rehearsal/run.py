"""Runs on the rehearsal device: a trajectory of the parity tests, a layer with counted waits, and complete runs."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moe.experts.experts import Cost
from moe.layers import MoELayer
from moe.parallel import Layout, apply
from moe.plan.degrees import ShardCounts
from moe.plan.placement import build_placements
from moe.spec import JobSpec, MoESpec, TrainSpec, TranslationModelSpec
from moe.storage.folder import Folder
from moe.tasks.task import Loss, RankBatch
from moe.tasks.translation.batches import PairsBatch
from moe.train.checkpoint.checkpointer import Checkpointer
from moe.train.checkpoint.state import run_tensors
from moe.train.moe_layers import MoELayers
from moe.train.optimizer.build import set_step
from moe.train.recorder import MemoryRecorder
from moe.train.signals import Signals
from moe.train.step import step
from moe.train.totals import StepTotals
from tests.parity.trajectory import Degrees, Shape, rank_batch, run, state_of
from tests.rehearsal.device import BACKLOGS, WAITS, register
from tests.unit import train_runs

Records = list[dict[str, Any]]
WaitCounts = dict[str, int]
"""Waits by kind and `file:line`."""


def on_device(model: TranslationModelSpec, train: TrainSpec, degrees: Degrees, shape: Shape, num_steps: int) -> Records:
    """Records of steps on the device."""
    return run(model, train, degrees, shape, num_steps, device=str(register()))


def save_and_resume(
    model: TranslationModelSpec, train: TrainSpec, degrees: Degrees, shape: Shape, url: str, on: str | None = None
) -> list[list[float]]:
    """Losses and gradient norm of the second step, then evaluation losses; on the device, or `on` another. One row is
    of a run that saved its first step and continued, the other of a run that resumed from it."""
    device = str(register()) if on is None else on
    plan, results = degrees.plan(shape.groups), []
    for group in range(2):
        layout = Layout.build(plan, device)
        state = state_of(model, train, layout)
        batches = [rank_batch(layout, plan, shape, model.source_vocab_size, number) for number in (1, 2)]
        tensors = run_tensors(state.model, state.parameters, state.optimizer, layout, updated=state.shards.parameters)
        checkpointer = Checkpointer(
            Folder(url), layout, tensors, attempt=1, group=group, keep=1, files={}, recorder=MemoryRecorder()
        )
        if group:
            marker = checkpointer.restore()
            set_step(state.optimizer, marker.step)
        else:
            step(state, batches[0], Signals())
            checkpointer.save(1, b"{}")
        record = step(state, batches[1], Signals()).record
        assert record.grad_norm is not None
        with torch.no_grad():
            losses = [
                state.task.loss(state.model, _for_evaluation(micro_batch)) for micro_batch in batches[0].micro_batches
            ]
        total = torch.stack([torch.stack((loss.objective, loss.nll)) for loss in losses]).sum(0).cpu()
        if layout.world_group is not None:
            dist.all_reduce(total)
        results.append([record.loss, record.nll, record.grad_norm, *total.tolist()])
        layout.close()
    return results


def _for_evaluation(batch: PairsBatch) -> PairsBatch:
    return replace(batch, context=replace(batch.context, training=False))


def waits_of_layer(spec: MoESpec, degrees: Degrees, backend: str | None = None) -> dict[str, WaitCounts]:
    """Waits in the forward and backward pass of one MoE layer; `backend` multiplies in float32."""
    device, dtype = register(), torch.float64 if backend is None else torch.float32
    layout = Layout.build(degrees.plan(num_groups=4), device)
    with torch.device("meta"):
        layer = MoELayer(spec, layer=1, dtype=dtype)
    apply(layer, build_placements(spec.parameters(), ShardCounts.from_degrees(layout.degrees)), layout)
    if backend is not None:
        layer.experts.costs = {backend: Cost(0.0, 0.0)}
    x = torch.randn(4 * spec.group_tokens, spec.model_dim, dtype=dtype, device=device, requires_grad=True)
    with WAITS.count() as forward:
        y, _ = layer(x)
    with WAITS.count() as backward:
        y.square().sum().backward()
    layout.close()
    return {"forward": _by_line(forward), "backward": _by_line(backward)}


def backlog_of_layer(spec: MoESpec, degrees: Degrees) -> list[int]:
    """Operations that the device has left to do when the host has waited in the forward pass of an MoE layer."""
    layout = Layout.build(degrees.plan(num_groups=4), register())
    with torch.device("meta"):
        layer = MoELayer(spec, layer=1)
    apply(layer, build_placements(spec.parameters(), ShardCounts.from_degrees(layout.degrees)), layout)
    BACKLOGS.clear()
    layer(torch.randn(4 * spec.group_tokens, spec.model_dim, device=layout.device))
    layout.close()
    return [number for _, number in BACKLOGS]


def waits_of_step(
    model: TranslationModelSpec, train: TrainSpec, degrees: Degrees, shape: Shape
) -> tuple[WaitCounts, int]:
    """(waits in a training step, number of its micro-batches)."""
    layout, plan = Layout.build(degrees.plan(shape.groups), register()), degrees.plan(shape.groups)
    state = state_of(model, train, layout)
    for number in (1, 2):  # the first step allocates buffers
        batch = rank_batch(layout, plan, shape, model.source_vocab_size, number)
        with WAITS.count() as counts:
            step(state, batch, Signals())
    layout.close()
    return _by_line(counts), len(batch.micro_batches)


def numbers_on_the_host() -> tuple[float | None, dict[str, float] | None, WaitCounts]:
    """(gradient norm, numbers, waits) of a step in which a user's module returns a number that is not on the device."""
    layout = Layout.single(register())
    totals = StepTotals(MoELayers(nn.Module(), layout), RankBatch(0, [None], 1, 1), layout, shares_tokens=False)
    nll, grad_norm = torch.ones((), device=layout.device), torch.full((), 3.0, device=layout.device)
    totals.add(Loss(nll, nll, {"temperature": torch.tensor(0.5), "nll": nll}), [])
    with WAITS.count() as counts:
        record = totals.reduce(Signals(), grad_norm.double()).record
    return record.grad_norm, record.numbers, _by_line(counts)


def _by_line(counts: Mapping[tuple[str, str], int]) -> WaitCounts:
    return {f"{kind}, {place}": number for (kind, place), number in sorted(counts.items())}


def runs(spec: JobSpec, folder: Path) -> dict[str, Any]:
    """Steps and reports of a job: on the CPU, on the device, and half on the CPU and half on the device."""
    device = str(register())
    results = {}
    for name, devices in {"cpu": ("cpu",), "device": (device,), "half and half": ("cpu", device)}.items():
        steps: list[dict[str, Any]] = []
        for attempt, run_device in enumerate(devices, 1):
            last = attempt == len(devices)
            outcome, recorder = train_runs.run(
                spec, folder / name.replace(" ", "-"), folder / "cache", attempt=attempt, device=run_device,
                control=None if last else train_runs.RequestAfter("pause", spec.train.num_steps // 2),
            )  # fmt: skip
            steps += train_runs.course(recorder)
        results[name] = {"steps": steps, "report": outcome.report.to_plain()}
    return results

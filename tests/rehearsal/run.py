"""What the tests do on the rehearsal device: a trajectory of the parity tests, a layer whose waits are
counted, and whole runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from moe.experts.choice import Cost
from moe.layers import MoELayer
from moe.parallel import Layout, apply
from moe.plan.degrees import Shards
from moe.plan.placement import placed
from moe.spec import JobSpec, MoESpec, TrainSpec, TranslationModelSpec
from moe.train.step import step
from moe.train.totals import Signals
from tests.parity.trajectory import Degrees, Shape, rank_batch, run, state_of
from tests.rehearsal.device import WAITS, register
from tests.unit import train_runs

Records = list[dict[str, Any]]
Found = dict[str, int]
"""Waits by kind and `file:line`."""


def on_device(
    model: TranslationModelSpec, train: TrainSpec, degrees: Degrees, shape: Shape, num_steps: int
) -> Records:
    """Records of steps on the device."""
    return run(model, train, degrees, shape, num_steps, device=str(register()))


def waits_of_layer(spec: MoESpec, degrees: Degrees, backend: str | None = None) -> dict[str, Found]:
    """Waits in the forward and in the backward pass of one layer of experts; `backend` multiplies in float32."""
    device, dtype = register(), torch.float64 if backend is None else torch.float32
    layout = Layout.build(degrees.plan(num_groups=4), device)
    with torch.device("meta"):
        layer = MoELayer(spec, layer=1, dtype=dtype)
    apply(layer, placed(spec.parameters(), Shards.of(layout.degrees)), layout)
    if backend is not None:
        layer.experts.costs = {backend: Cost(0.0, 0.0)}
    x = torch.randn(4 * spec.group_tokens, spec.model_dim, dtype=dtype, device=device, requires_grad=True)
    with WAITS.counted() as forward:
        y, _ = layer(x)
    with WAITS.counted() as backward:
        y.square().sum().backward()
    layout.close()
    return {"forward": _by_line(forward), "backward": _by_line(backward)}


def waits_of_step(
    model: TranslationModelSpec, train: TrainSpec, degrees: Degrees, shape: Shape
) -> tuple[Found, int]:
    """(waits in a training step, its micro-batches)."""
    layout, plan = Layout.build(degrees.plan(shape.groups), register()), degrees.plan(shape.groups)
    state = state_of(model, train, layout)
    for number in (1, 2):  # the first makes buffers
        batch = rank_batch(layout, plan, shape, model.source_vocab_size, number)
        with WAITS.counted() as found:
            step(state, batch, Signals())
    layout.close()
    return _by_line(found), len(batch.micro_batches)


def _by_line(counts: Mapping[tuple[str, str], int]) -> Found:
    return {f"{kind}, {where}": number for (kind, where), number in sorted(counts.items())}


def runs(spec: JobSpec, folder: Path) -> dict[str, Any]:
    """Courses and reports of a job: on the CPU, on the device, and on the device after half of it on the CPU."""
    device = str(register())
    found = {}
    for name, devices in {"cpu": ("cpu",), "device": (device,), "half and half": ("cpu", device)}.items():
        steps: list[dict[str, Any]] = []
        for attempt, each in enumerate(devices, 1):
            last = attempt == len(devices)
            outcome, recorder = train_runs.run(
                spec, folder / name.replace(" ", "-"), folder / "cache", attempt=attempt, device=each,
                control=None if last else train_runs.RequestAfter("pause", spec.train.num_steps // 2),
            )  # fmt: skip
            steps += train_runs.course(recorder)
        assert outcome.report is not None
        found[name] = {"steps": steps, "report": outcome.report.to_plain()}
    return found

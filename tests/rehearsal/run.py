"""What the tests do on the rehearsal device: a trajectory of the parity tests, a layer whose waits are
counted, and whole runs."""

from pathlib import Path
from typing import Any

import torch

from moe.layers import MoELayer
from moe.parallel import Layout, apply
from moe.plan.degrees import Shards
from moe.plan.placement import placed
from moe.spec import JobSpec, MoESpec, TrainSpec, TranslationModelSpec
from tests.parity.trajectory import Degrees, Shape, run
from tests.rehearsal.device import WAITS, register
from tests.unit import train_runs

Records = list[dict[str, Any]]


def on_device(
    model: TranslationModelSpec, train: TrainSpec, degrees: Degrees, shape: Shape, num_steps: int
) -> Records:
    """Records of steps on the device."""
    return run(model, train, degrees, shape, num_steps, device=str(register()))


def waits_of_layer(spec: MoESpec, degrees: Degrees) -> dict[str, dict[str, int]]:
    """Waits in the forward and in the backward pass of one layer of experts, by kind and `file:line`."""
    device = register()
    layout = Layout.build(degrees.plan(num_groups=4), device)
    with torch.device("meta"):
        layer = MoELayer(spec, layer=1, dtype=torch.float64)
    apply(layer, placed(spec.parameters(), Shards.of(layout.degrees)), layout)
    found = {}
    x = torch.randn(
        4 * spec.group_tokens, spec.model_dim, dtype=torch.float64, device=device, requires_grad=True
    )
    with WAITS.counted() as forward:
        y, _ = layer(x)
    with WAITS.counted() as backward:
        y.square().sum().backward()
    layout.close()
    for name, counts in (("forward", forward), ("backward", backward)):
        found[name] = {f"{kind}, {where}": number for (kind, where), number in sorted(counts.items())}
    return found


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

"""A trajectory of the parity tests on the rehearsal device, beside the same on the CPU."""

from typing import Any

from moe.spec import TrainSpec, TranslationModelSpec
from tests.parity.trajectory import Degrees, Shape, run
from tests.rehearsal.device import WAITS, register


def both(
    model: TranslationModelSpec, train: TrainSpec, degrees: Degrees, shape: Shape, num_steps: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[tuple[str, str], int]]:
    """(records on the CPU, on the device, what the host waited for there)."""
    device = register()  # before anything else: autograd makes threads for devices at its first pass
    on_cpu = run(model, train, degrees, shape, num_steps)
    with WAITS.counted() as waits:
        here = run(model, train, degrees, shape, num_steps, device=str(device))
    return on_cpu, here, dict(waits)

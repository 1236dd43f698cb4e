"""Calibrations laid over device types: a device's own figures change nothing, and each changes what it names."""

from dataclasses import replace
from typing import Any

import pytest

from moe.plan import DEVICES, Calibration
from moe.plan.cluster.kernels import Kernels

GPUS = [name for name, each in DEVICES.items() if each.kind == "cuda" and each.kernels.ring.start_s]


def own_figures(name: str) -> dict[str, Any]:
    """What would be measured of a device that is exactly its type."""
    device = DEVICES[name]
    return {
        "flops_per_s": {
            dtype: device.kernels.products[dtype].achieved_flops_per_s(8192) for dtype in ("float32", "bfloat16")
        },
        "memory_bytes_per_s": device.memory_bytes_per_s,
        "attention_flops_per_s": device.kernels.attention_of(256).achieved_flops_per_s(64, 4096, 256),
        "half_rows": 180.0, "expert_half_rows": 230.0,
    }  # fmt: skip


def seconds(kernels: Kernels) -> list[float]:
    """Of kernels of several sizes."""
    products = [each.seconds(rows, 4096, 1024) for each in kernels.products.values() for rows in (64, 8192)]
    experts = [each.seconds(rows, rows, 8, 2048, 1024, 3) for each in kernels.experts.values() for rows in (64, 8192)]
    attention = [each.seconds(4096, 4096, 16, 4, widths) for widths, each in kernels.attention.items()]
    return [*products, *experts, *attention]


@pytest.mark.parametrize("name", GPUS)
def test_a_device_that_is_as_its_type_stays_so(name: str) -> None:
    measured = Calibration(machine="as ever", device="cuda", **own_figures(name)).on(DEVICES[name])
    assert seconds(measured.kernels) == pytest.approx(seconds(DEVICES[name].kernels))


@pytest.mark.parametrize("figure", ["flops_per_s", "memory_bytes_per_s", "attention_flops_per_s"])
def test_what_is_slower_by_half_makes_its_kernels_slower_and_none_faster(figure: str) -> None:
    figures = own_figures("h100")
    given = figures[figure]
    slower = {key: rate / 2 for key, rate in given.items()} if isinstance(given, dict) else given / 2
    changed = Calibration(machine="slow", device="cuda", **{**figures, figure: slower}).on(DEVICES["h100"])
    before, after = seconds(DEVICES["h100"].kernels), seconds(changed.kernels)
    assert all(now >= then * (1 - 1e-9) for now, then in zip(after, before, strict=True))
    assert any(now > then * 1.05 for now, then in zip(after, before, strict=True))


def test_nothing_measured_changes_nothing() -> None:
    for name, device in DEVICES.items():
        calibration = Calibration(machine="none", device=device.kind if device.kind != "tpu" else "cuda")  # type: ignore[arg-type]
        found = calibration.on(device)
        assert replace(found, kernels=device.kernels) == device, name
        assert seconds(found.kernels) == pytest.approx(seconds(device.kernels)), name

"""Calibrations applied to device types: a device's own figures change nothing, and slower ones slow its kernels."""

from dataclasses import replace
from typing import Any

import pytest

from moe.plan import DEVICES, Calibration
from moe.plan.cluster.kernels import Kernels

GPUS = [name for name, device in DEVICES.items() if device.kind == "cuda" and device.kernels.ring.start_s]


def own_figures(name: str) -> dict[str, Any]:
    """Figures measured on a device that is exactly its type."""
    device = DEVICES[name]
    products = {dtype: device.kernels.products[dtype].achieved_flops_per_s(8192) for dtype in ("float32", "bfloat16")}
    return {
        "flops_per_s": products, "memory_bytes_per_s": device.memory_bytes_per_s,
        "attention_flops_per_s": device.kernels.attention_of(256).achieved_flops_per_s(64, 4096, 256),
        "half_rows": 180.0, "expert_half_rows": 230.0,
    }  # fmt: skip


def seconds(kernels: Kernels) -> list[float]:
    """Seconds of kernels of several sizes."""
    products = [kernel.seconds(rows, 4096, 1024) for kernel in kernels.products.values() for rows in (64, 8192)]
    experts = [kernel.seconds(r, r, 8, 2048, 1024, 3) for kernel in kernels.experts.values() for r in (64, 8192)]
    attention = [kernel.seconds(4096, 4096, 16, 4, widths) for widths, kernel in kernels.attention.items()]
    return [*products, *experts, *attention]


@pytest.mark.parametrize("name", GPUS)
def test_a_device_with_the_figures_of_its_type_is_unchanged(name: str) -> None:
    device = Calibration(machine="as ever", device="cuda", **own_figures(name)).apply_to(DEVICES[name])
    assert seconds(device.kernels) == pytest.approx(seconds(DEVICES[name].kernels))


@pytest.mark.parametrize("figure", ["flops_per_s", "memory_bytes_per_s", "attention_flops_per_s"])
def test_a_figure_slower_by_half_slows_its_kernels_and_speeds_up_none(figure: str) -> None:
    figures, half = own_figures("h100"), lambda rate: rate / 2
    rate = figures[figure]
    figures[figure] = {dtype: half(rate) for dtype, rate in rate.items()} if isinstance(rate, dict) else half(rate)
    slow_device = Calibration(machine="slow", device="cuda", **figures).apply_to(DEVICES["h100"])
    ratios = [
        new / old for new, old in zip(seconds(slow_device.kernels), seconds(DEVICES["h100"].kernels), strict=True)
    ]
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) > 1.05


@pytest.mark.parametrize("name", DEVICES)
def test_a_calibration_without_figures_changes_nothing(name: str) -> None:
    device = DEVICES[name]
    calibration = Calibration(machine="none", device="cuda" if device.kind == "tpu" else device.kind)
    result = calibration.apply_to(device)
    assert replace(result, kernels=device.kernels) == device
    assert seconds(result.kernels) == pytest.approx(seconds(device.kernels))

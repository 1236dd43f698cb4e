"""Measured rates of a machine, which override its device type's constants."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import Field

from moe.plan.cluster.devices import Device
from moe.plan.cluster.kernels import USUAL_WIDTHS, Kernels
from moe.spec.base import Count, CountOrZero, Latency, NonNegative, Rate, Spec
from moe.spec.resources import DeviceKind

METHOD = 2
"""Version of the measurement method."""


class Calibration(Spec):
    """Measured rates of one device, from `shardyard calibrate`; other rates are those of its type."""

    machine: str
    """Processor or GPU, and software versions."""
    method: CountOrZero = METHOD
    device: DeviceKind = "cpu"
    accelerator: str | None = None
    """The cluster's name for its GPUs, if one was measured."""
    flops_per_s: dict[Literal["float32", "bfloat16", "float64", "fp8"], Rate] = Field(default_factory=dict)
    """By dtype, of large products; other dtypes scale like bfloat16, or else float32."""
    memory_bytes_per_s: Rate | None = None
    half_rows: NonNegative | None = None
    expert_half_rows: NonNegative | None = None
    layer_s: Latency | None = None
    attention_flops_per_s: Rate | None = None
    """Fused attention: in bfloat16 on a GPU, in float32 on a CPU."""
    within_node_bytes_per_s: Rate | None = None
    across_nodes_bytes_per_s: Rate | None = None
    latency_s: Latency | None = None
    across_latency_s: Latency | None = None

    cores: Count | None = None
    """Number of devices that reach these rates at once; more on a node share them."""

    def apply_to(self, device: Device, devices_per_node: int = 1) -> Device:
        """The device with the measured rates, one of `devices_per_node`."""
        share = 1.0 if self.cores is None else min(1.0, self.cores / devices_per_node)
        memory = share * _or_default(self.memory_bytes_per_s, device.memory_bytes_per_s)
        layer_s = None if device.layer_s is None else _or_default(self.layer_s, device.layer_s) / share
        kernels = self._arithmetic(device.kernels, memory / device.memory_bytes_per_s, share)
        return replace(
            device, kernels=self._links(kernels, share), memory_bytes_per_s=memory, layer_s=layer_s,
            across_nodes_bytes_per_s=_or_default(self.across_nodes_bytes_per_s, device.across_nodes_bytes_per_s),
            across_latency_s=_or_default(self.across_latency_s, device.across_latency_s),
        )  # fmt: skip

    def _arithmetic(self, kernels: Kernels, memory: float, share: float) -> Kernels:
        """Kernels at the measured rates. `memory`: ratio to the type's memory rate. `half_rows` does not apply to
        fitted kernels, whose constants include the cost of few rows."""
        faster = {dtype: share * ratio for dtype, ratio in self._ratios(kernels).items()}
        is_measured = kernels.ring.start_s > 0
        products = {
            dtype: replace(
                kernel, flops_per_s=faster[dtype] * kernel.flops_per_s, bytes_per_s=memory * kernel.bytes_per_s,
                half_rows=kernel.half_rows if is_measured else _or_default(self.half_rows, kernel.half_rows),
            )
            for dtype, kernel in kernels.products.items()
        }  # fmt: skip
        experts = {
            dtype: replace(
                kernel, flops_per_s=faster[dtype] * kernel.flops_per_s, bytes_per_s=memory * kernel.bytes_per_s,
                half_rows=kernel.half_rows if is_measured else _or_default(self.expert_half_rows, kernel.half_rows),
                row_s=kernel.row_s / memory, hidden_s=kernel.hidden_s / memory, token_s=kernel.token_s / memory,
            )
            for dtype, kernel in kernels.experts.items()
        }  # fmt: skip
        pairs = share
        if self.attention_flops_per_s is not None:
            usual = kernels.attention_of(USUAL_WIDTHS)
            pairs *= self.attention_flops_per_s / usual.achieved_flops_per_s(_HEADS, _LENGTH, USUAL_WIDTHS)
        elif self.flops_per_s:
            pairs = faster[kernels.attention_dtype]
        attention = {
            widths: replace(kernel, flops_per_s=pairs * kernel.flops_per_s)
            for widths, kernel in kernels.attention.items()
        }
        return replace(kernels, products=products, experts=experts, attention=attention)

    def _links(self, kernels: Kernels, share: float) -> Kernels:
        """Set the measured bandwidth and step latency of collectives."""
        rate, latency_s = self.within_node_bytes_per_s, self.latency_s
        ring = replace(
            kernels.ring,
            bytes_per_s=_or_default(rate, kernels.ring.bytes_per_s),
            step_s=_or_default(latency_s, kernels.ring.step_s) / share,
        )
        all_to_all = replace(
            kernels.all_to_all,
            bytes_per_s=_or_default(rate, kernels.all_to_all.bytes_per_s),
            doubling_s=_or_default(latency_s, kernels.all_to_all.doubling_s) / share,
        )
        return replace(kernels, ring=ring, all_to_all=all_to_all)

    def _ratios(self, kernels: Kernels) -> dict[str, float]:
        """Measured rate of large products over the type's, by dtype; others as bfloat16, or else float32."""
        ratios: dict[str, float] = {
            name: rate / kernels.products[name].achieved_flops_per_s(_LARGE)
            for name, rate in self.flops_per_s.items()
            if name in kernels.products
        }
        usual = ratios.get("bfloat16", next(iter(ratios.values()), 1.0))
        return {name: ratios.get(name, usual) for name in kernels.products}


_LARGE = 8192
_HEADS, _LENGTH = 64, 4096
"""Heads and positions of the attention measurement."""


def _or_default(measurement: float | None, default: float) -> float:
    return default if measurement is None else measurement


FILE = "calibration-cpu.json"
CLUSTER_FILE = "calibration-cluster-{}.json"
"""Devices of a cluster, by kind, and links between nodes."""


def read_calibration(folder: Path, file: str = FILE) -> Calibration | None:
    """Calibration stored in a folder; None if unreadable or measured by another method."""
    try:
        fields = json.loads((folder / file).read_bytes())
        return Calibration.model_validate(fields) if fields["method"] == METHOD else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_calibration(folder: Path, calibration: Calibration, file: str = FILE) -> None:
    """Write a calibration atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"{file}.{os.getpid()}"
    draft.write_text(calibration.model_dump_json(indent=1))
    draft.replace(folder / file)

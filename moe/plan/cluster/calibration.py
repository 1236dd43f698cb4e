"""Measured rates of a machine, in place of its device type's constants."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import Field

from moe.plan.cluster.devices import Device
from moe.spec.base import Count, CountOrZero, NonNegative, Positive, Spec
from moe.spec.resources import DeviceKind

METHOD = 2
"""Changes with how figures are measured."""


class Calibration(Spec):
    """Rates of one device, measured: `shardyard calibrate` makes it. What is left out stays the device type's."""

    machine: str
    """Processor or GPU, and the versions that it was measured with."""
    method: CountOrZero = METHOD
    device: DeviceKind = "cpu"
    accelerator: str | None = None
    """Name that the cluster gives its GPUs, where one was measured."""
    flops_per_s: dict[Literal["float32", "bfloat16", "float64", "fp8"], Positive] = Field(
        default_factory=dict
    )
    """By dtype, of large matrix products. Those of others scale as bfloat16's does, or float32's."""
    memory_bytes_per_s: Positive | None = None
    half_rows: NonNegative | None = None
    expert_half_rows: NonNegative | None = None
    layer_s: NonNegative | None = None
    attention_flops_per_s: Positive | None = None
    """Of fused attention: in bfloat16 on a GPU, in float32 on a CPU."""
    within_node_bytes_per_s: Positive | None = None
    across_nodes_bytes_per_s: Positive | None = None
    latency_s: NonNegative | None = None
    across_latency_s: NonNegative | None = None

    cores: Count | None = None
    """Devices that reach these rates at once: where a node has more, they take turns."""

    def on(self, device: Device, devices_per_node: int = 1) -> Device:
        """The device with what was measured, one of so many of a node."""
        names = (
            "memory_bytes_per_s", "half_rows", "expert_half_rows", "layer_s", "within_node_bytes_per_s",
            "across_nodes_bytes_per_s", "latency_s", "across_latency_s",
        )  # fmt: skip
        measured = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.flops_per_s:  # what products reached is the peak that they are held against
            measured |= {"flops_per_s": self._rates(device), "efficiency": 1.0}
            if self.attention_flops_per_s is not None:
                dtype = "bfloat16" if self.device == "cuda" else "float32"
                measured["attention_efficiency"] = self.attention_flops_per_s / measured["flops_per_s"][dtype]
        if self.within_node_bytes_per_s is not None:
            measured |= {"link_efficiency": 1.0}
        if self.across_nodes_bytes_per_s is not None:
            measured |= {"across_efficiency": 1.0}
        found = replace(device, **measured)
        if self.cores is None or devices_per_node <= self.cores:
            return found
        share = self.cores / devices_per_node
        rates = {dtype: rate * share for dtype, rate in found.flops_per_s.items()}
        return replace(found, flops_per_s=rates, memory_bytes_per_s=found.memory_bytes_per_s * share,
                       layer_s=found.layer_s / share, latency_s=found.latency_s / share)  # fmt: skip

    def _rates(self, device: Device) -> dict[str, float]:
        """Rates of matrix products, by dtype."""
        known: dict[str, float] = {str(name): rate for name, rate in self.flops_per_s.items()}
        dtype = "bfloat16" if "bfloat16" in known else next(iter(known))
        share = known[dtype] / device.flops_per_s[dtype] if dtype in device.flops_per_s else device.efficiency
        return {name: share * peak for name, peak in device.flops_per_s.items()} | known


FILE = "calibration-cpu.json"
"""Of this machine's CPU."""
CLUSTER_FILE = "calibration-cluster-{}.json"
"""Of the devices of a cluster, by kind, and of the links between its nodes."""


def read_calibration(folder: Path, file: str = FILE) -> Calibration | None:
    """The calibration stored in a folder; None where none can be read, or it was measured otherwise."""
    try:
        found = json.loads((folder / file).read_bytes())
        return Calibration.model_validate(found) if found["method"] == METHOD else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_calibration(folder: Path, calibration: Calibration, file: str = FILE) -> None:
    """Readers see all of it or what was there before."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"{file}.{os.getpid()}"
    draft.write_text(calibration.model_dump_json(indent=1))
    draft.replace(folder / file)

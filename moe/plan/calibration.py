"""What was measured of a machine, in place of its device type's constants."""

import os
from dataclasses import replace
from pathlib import Path

from pydantic import Field

from moe.plan.devices import Device
from moe.spec.base import Count, NonNegative, Positive, Spec


class Calibration(Spec):
    """Rates of one device, measured: `shardyard calibrate` makes it. What is left out stays the device type's."""

    machine: str
    """Processor or GPU, and the versions that it was measured with."""
    flops_per_s: dict[str, Positive] = Field(default_factory=dict)
    """By dtype, of large matrix products."""
    memory_bytes_per_s: Positive | None = None
    half_rows: NonNegative | None = None
    expert_half_rows: NonNegative | None = None
    layer_s: NonNegative | None = None
    attention_flops_per_s: Positive | None = None
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
            measured |= {"flops_per_s": {**device.flops_per_s, **self.flops_per_s}, "efficiency": 1.0}
            if self.attention_flops_per_s is not None:
                largest = max(self.flops_per_s.values())
                measured["attention_efficiency"] = self.attention_flops_per_s / largest
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


FILE = "calibration-cpu.json"


def read_calibration(folder: Path) -> Calibration | None:
    """What was stored in a folder for this machine's CPU; None where there is nothing that can be read."""
    try:
        return Calibration.model_validate_json((folder / FILE).read_bytes())
    except (OSError, ValueError):
        return None


def write_calibration(folder: Path, calibration: Calibration) -> None:
    """Readers see all of it or what was there before."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"{FILE}.{os.getpid()}"
    draft.write_text(calibration.model_dump_json(indent=1))
    draft.replace(folder / FILE)

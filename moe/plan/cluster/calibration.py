"""Measured rates of a machine, in place of its device type's constants."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import Field

from moe.plan.cluster.devices import Device
from moe.plan.cluster.kernels import Kernels
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
        share = 1.0 if self.cores is None else min(1.0, self.cores / devices_per_node)
        memory = share * (self.memory_bytes_per_s or device.memory_bytes_per_s)
        kernels = device.kernels
        if self.flops_per_s or self.memory_bytes_per_s is not None or share < 1:
            kernels = self._arithmetic(kernels, memory, share)
        if self.within_node_bytes_per_s is not None or self.latency_s is not None or share < 1:
            kernels = self._links(kernels, share)
        return replace(
            device, kernels=kernels, memory_bytes_per_s=memory,
            layer_s=None if device.layer_s is None else (self.layer_s or device.layer_s) / share,
            across_nodes_bytes_per_s=self.across_nodes_bytes_per_s or device.across_nodes_bytes_per_s,
            across_latency_s=self.across_latency_s or device.across_latency_s,
        )  # fmt: skip

    def _arithmetic(self, of: Kernels, memory_bytes_per_s: float, share: float) -> Kernels:
        """Kernels at the rates that large ones reached."""
        rates = self._rates(of)
        slower = max(each.bytes_per_s for each in of.products.values()) / memory_bytes_per_s
        products = {
            dtype: replace(
                each, flops_per_s=share * rates[dtype], bytes_per_s=memory_bytes_per_s,
                half_rows=each.half_rows if self.half_rows is None else self.half_rows,
            )
            for dtype, each in of.products.items()
        }  # fmt: skip
        experts = {
            dtype: replace(
                each, flops_per_s=each.flops_per_s * share * rates[dtype] / of.products[dtype].flops_per_s,
                half_rows=each.half_rows if self.expert_half_rows is None else self.expert_half_rows,
                bytes_per_s=each.bytes_per_s / slower, row_s=each.row_s * slower, hidden_s=each.hidden_s * slower,
                token_s=each.token_s * slower,
            )
            for dtype, each in of.experts.items()
        }  # fmt: skip
        attention = {}
        for widths, each in of.attention.items():
            faster = share
            if self.attention_flops_per_s is not None:
                faster *= self.attention_flops_per_s / of.attention_of(_MEASURED_WIDTHS).flops_per_s
            attention[widths] = replace(each, flops_per_s=faster * each.flops_per_s)
        return replace(of, products=products, experts=experts, attention=attention)

    def _links(self, of: Kernels, share: float) -> Kernels:
        """Collectives at the rate that was measured; a step's latency is of either."""
        rate, latency_s = self.within_node_bytes_per_s, self.latency_s
        ring = replace(
            of.ring, bytes_per_s=rate or of.ring.bytes_per_s, step_s=_known(latency_s, of.ring.step_s) / share
        )
        all_to_all = replace(
            of.all_to_all,
            bytes_per_s=rate or of.all_to_all.bytes_per_s,
            doubling_s=_known(latency_s, of.all_to_all.doubling_s) / share,
        )
        return replace(of, ring=ring, all_to_all=all_to_all)

    def _rates(self, of: Kernels) -> dict[str, float]:
        """Rates of matrix products, by dtype."""
        rates = {name: each.flops_per_s for name, each in of.products.items()}
        known: dict[str, float] = {name: rate for name, rate in self.flops_per_s.items() if name in rates}
        if not known:
            return rates
        dtype = "bfloat16" if "bfloat16" in known else next(iter(known))
        return {name: known[dtype] / rates[dtype] * rate for name, rate in rates.items()} | known


_MEASURED_WIDTHS = 256
"""Of a head's scores and values together, where attention is measured."""


def _known(measured: float | None, otherwise: float) -> float:
    return otherwise if measured is None else measured


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

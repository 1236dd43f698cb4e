"""What was measured of a machine, in place of its device type's constants."""

from dataclasses import replace

from pydantic import Field

from moe.plan.devices import Device
from moe.spec.base import NonNegative, Positive, Spec


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

    def on(self, device: Device) -> Device:
        """The device with what was measured."""
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
        return replace(device, **measured)

"""Facts of a device type that is not in the table, as its data sheet has them."""

from pydantic import Field

from moe.plan.cluster.devices import Device, unmeasured
from moe.spec.base import Count, Rate, Spec, Text


class DeviceFacts(Spec):
    """A GPU by the figures of its data sheet: what `device` may be in place of a name."""

    name: Text = Field(default="unnamed", min_length=1, max_length=64)
    memory_bytes: Count
    bfloat16_flops_per_s: Rate
    """Dense products: half of what data sheets say of sparse ones."""
    memory_bytes_per_s: Rate
    link_bytes_per_s: Rate
    """Links within a node, of one device, in one direction: half of what data sheets say of both."""
    fp8_flops_per_s: Rate | None = None
    """Dense products in fp8; left out, it has none."""
    across_nodes_bytes_per_s: Rate = 50e9
    """Network adapters, of one device, in one direction: one of 400 Gb/s when left out."""
    assumed_as: Text | None = None
    """The device type whose rates these are, where nothing is known of its own."""

    def device(self) -> Device:
        """The device, whose kernels reach as much of these rates as those of H100 do of its own."""
        source = "the rates given, of which H100's kernels reach as much"
        if self.assumed_as is not None:
            source = f"the rates of {self.assumed_as}, since nothing is known of its own"
        return unmeasured(
            source, self.memory_bytes, self.bfloat16_flops_per_s, self.fp8_flops_per_s, self.memory_bytes_per_s,
            self.link_bytes_per_s, self.across_nodes_bytes_per_s,
        )  # fmt: skip

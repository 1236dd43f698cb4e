"""Cluster of equal nodes: devices, and the links between them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any

from pydantic import (  # fmt: skip
    Field,
    SerializerFunctionWrapHandler,
    StrictBool,
    ValidationError,
    model_serializer,
    model_validator,
)

from moe.plan.cluster.calibration import Calibration
from moe.plan.cluster.devices import DEVICES, Device
from moe.plan.cluster.facts import DeviceFacts
from moe.plan.cluster.kernels import CollectiveCost, ExchangeCost
from moe.spec.base import Count, Latency, Rate, Spec
from moe.spec.errors import Problem, SpecError
from moe.spec.problems import problems_of

Share = Annotated[float, Field(strict=True, ge=0.001, le=1000)]
Price = Annotated[float, Field(strict=True, ge=1e-6, le=1e9)]


FACTS = (
    "{name: x100, memory_bytes: 80000000000, bfloat16_flops_per_s: 5.0e+14, memory_bytes_per_s: 2.0e+12, "
    "link_bytes_per_s: 3.0e+11}"
)
_device_of = lru_cache(64)(DeviceFacts.device)


class Link(Spec):
    """One level of the network."""

    devices: Count
    """Consecutive devices that it joins."""
    bytes_per_s: Rate
    """Bandwidth per device for large messages, one direction."""
    latency_s: Latency


@dataclass(frozen=True)
class Level:
    """One level of the network, with its collective costs."""

    devices: int
    """Consecutive devices that it joins."""
    ring: CollectiveCost
    all_to_all: CollectiveCost
    is_measured: bool = False
    """Whether the constants are of a measured node: rings only."""


def _link_costs(bytes_per_s: float, latency_s: float) -> tuple[CollectiveCost, CollectiveCost]:
    """(ring, all-to-all) constants of links with this bandwidth and step latency."""
    return CollectiveCost(bytes_per_s, step_s=latency_s), CollectiveCost(bytes_per_s, doubling_s=latency_s)


def _with_bandwidth(cost: CollectiveCost, bytes_per_s: float) -> CollectiveCost:
    """The same at another bandwidth; a rank's own share is copied at least as fast."""
    return replace(cost, bytes_per_s=bytes_per_s, own_bytes_per_s=max(cost.own_bytes_per_s, bytes_per_s))


class Cluster(Spec):
    """The devices of a cluster, all of one type."""

    num_nodes: Count
    devices_per_node: Count
    device: str = "cpu"
    """Name in `DEVICES`, or of given `DeviceFacts`. A `cpu` device is one core."""
    device_facts: DeviceFacts | None = None
    memory_bytes: Count
    links: tuple[Link, ...] | None = Field(default=None, min_length=1)
    """Innermost first; the last joins all devices. Default: the device type's, within and across nodes."""
    rails: StrictBool = False
    """Rail-optimized: a device reaches only the same local rank in other nodes, and others through it."""
    torus: tuple[Count, Count] | None = None
    """Sides of a 2D torus, with one level of links."""
    calibration: Calibration | None = None
    within_share: Share = 1.0
    across_share: Share = 1.0
    """Share of the type's bandwidth within and across nodes; below 1 if oversubscribed."""
    price_per_hour: Price | None = None
    """Price of one device, in the file's currency."""
    billing_unit: Count | None = None
    """Devices billed together, with or without a worker; default: a node's. 1 if rented singly."""

    @model_validator(mode="before")
    @classmethod
    def _resolve_device(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        if isinstance(device_fields := fields.get("device"), dict | DeviceFacts):
            facts = _facts_of(device_fields)
            fields = {**fields, "device": facts.name, "device_facts": facts}
        if fields.get("memory_bytes") is not None:
            return fields
        if (device_facts := fields.get("device_facts")) is not None:
            facts = _facts_of(device_facts)
            return {**fields, "device": facts.name, "device_facts": facts, "memory_bytes": facts.memory_bytes}
        device = DEVICES.get(str(fields.get("device", "cpu")))
        return {
            **fields,
            "memory_bytes": device.memory_bytes if device else 1,
        }  # an unknown device is reported by _problems

    @model_serializer(mode="wrap")
    def _omit_unset_fields(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit None, so that digests of clusters without these fields do not change."""
        fields: dict[str, Any] = handler(self)
        for name in ("price_per_hour", "billing_unit", "device_facts"):
            if getattr(self, name) is None:
                fields.pop(name, None)
        return fields

    @model_validator(mode="after")
    def _check_consistent(self) -> "Cluster":
        if problems := list(self._problems()):
            raise SpecError(problems)
        return self

    def _problems(self) -> list[Problem]:
        problems = []
        if self.device_facts is None and self.device not in DEVICES:
            problems.append(Problem("not_a_choice", "device", self.device, "is not a known device type",
                                    f"use one of {', '.join(DEVICES)}; or describe the device: {FACTS}"))  # fmt: skip
        elif self.calibration is not None and self.calibration.device != self.device_type.kind:
            kind = self.device_type.kind
            problems.append(Problem("mismatch", "calibration.device", self.calibration.device,
                                    f"must be that of a {self.device} (={kind!r})",
                                    "use a calibration of such devices, or omit it"))  # fmt: skip
        if self.torus is not None and self.torus[0] * self.torus[1] != self.num_devices:
            problems.append(Problem("mismatch", "torus", self.torus,
                                    f"must have as many places as devices (={self.num_devices})",
                                    "correct its sides or the number of nodes"))  # fmt: skip
        if self.torus is not None and len(self.links or ()) > 1:
            problems.append(Problem("unsupported", "links", None, "must have one level on a torus", "use one level"))
        for index, (inner, outer) in enumerate(zip(self.links or (), (self.links or ())[1:], strict=False)):
            if outer.devices <= inner.devices or outer.devices % inner.devices:
                problems.append(Problem("not_divisible", f"links[{index + 1}].devices", outer.devices,
                                        f"must be a multiple of the level within it (={inner.devices})",
                                        "list links from the innermost out"))  # fmt: skip
        if self.links and self.links[-1].devices < self.num_devices:
            problems.append(Problem("out_of_range", f"links[{len(self.links) - 1}].devices", self.links[-1].devices,
                                    f"must be at least the number of devices (={self.num_devices})",
                                    "add the outermost level"))  # fmt: skip
        return problems

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    def billed_devices(self, num_workers: int) -> int:
        """`num_workers` rounded up to whole billing units."""
        unit = self.billing_unit or self.devices_per_node
        return -(-num_workers // unit) * unit

    @property
    def device_type(self) -> Device:
        """Device type, without the calibration."""
        return DEVICES[self.device] if self.device_facts is None else _device_of(self.device_facts)

    @property
    def calibrated_device(self) -> Device:
        """Device at the calibrated rates, if there are any."""
        device = self.device_type
        return device if self.calibration is None else self.calibration.apply_to(device, self.devices_per_node)

    @property
    def levels(self) -> tuple[Level, ...]:
        """Network levels. Given links replace bandwidth and step latency of the type's; measured launch time and
        channel setup within a node stay."""
        device = self.calibrated_device
        ring, all_to_all = device.kernels.ring, device.kernels.all_to_all
        is_measured = ring.start_s > 0
        if self.links is not None:
            inner, *outer = self.links
            if not is_measured or inner.devices > self.devices_per_node:
                return tuple(Level(link.devices, *_link_costs(link.bytes_per_s, link.latency_s)) for link in self.links)
            steps = replace(_with_bandwidth(ring, inner.bytes_per_s), step_s=inner.latency_s)
            doublings = replace(_with_bandwidth(all_to_all, inner.bytes_per_s), doubling_s=inner.latency_s, step_s=0.0)
            return (
                Level(inner.devices, steps, doublings, is_measured=True),
                *(Level(link.devices, *_link_costs(link.bytes_per_s, link.latency_s)) for link in outer),
            )
        share = self.within_share
        ring = _with_bandwidth(ring, share * ring.bytes_per_s)
        all_to_all = _with_bandwidth(all_to_all, share * all_to_all.bytes_per_s)
        node_level = Level(self.devices_per_node, ring, all_to_all, is_measured)
        if self.num_nodes == 1:
            return (node_level,)
        rate = self.across_share * device.across_nodes_bytes_per_s
        network_level = Level(self.num_devices, *_link_costs(rate, device.across_latency_s))
        return (network_level,) if self.sides or self.devices_per_node == 1 else (node_level, network_level)

    @property
    def exchange(self) -> ExchangeCost | None:
        """Fused dispatch over this cluster's links; None if not measured on the device type."""
        kernel = self.calibrated_device.kernels.exchange
        if kernel is None:
            return None
        plain, levels = self.device_type, self.levels
        inner_ratio = outer_ratio = 1.0
        if levels[0].devices <= self.devices_per_node:
            inner_ratio = levels[0].ring.bytes_per_s / plain.kernels.ring.bytes_per_s
        if self.num_nodes > 1:
            outer_ratio = levels[-1].ring.bytes_per_s / plain.across_nodes_bytes_per_s
        return replace(
            kernel, link_bytes_per_s=inner_ratio * kernel.link_bytes_per_s,
            forward_bytes_per_s=inner_ratio * kernel.forward_bytes_per_s,
            line_bytes_per_s=outer_ratio * kernel.line_bytes_per_s,
        )  # fmt: skip

    @property
    def sides(self) -> tuple[int, int] | None:
        """Sides of the torus: given, or the squarest if the device type has one; else None."""
        if self.torus is not None or not self.calibrated_device.torus or self.links is not None:
            return self.torus
        side = next(side for side in range(int(self.num_devices**0.5), 0, -1) if self.num_devices % side == 0)
        return side, self.num_devices // side

    def with_links(self, inner_factor: float, outer_factor: float) -> "Cluster":
        """The cluster with bandwidths times `inner_factor` on the innermost level, `outer_factor` on others."""
        if self.links is None:
            shares = {
                "within_share": inner_factor * self.within_share,
                "across_share": outer_factor * self.across_share,
            }
            return self.model_copy(update=shares)
        inner, *outer = self.links
        links = (
            inner.model_copy(update={"bytes_per_s": inner_factor * inner.bytes_per_s}),
            *(link.model_copy(update={"bytes_per_s": outer_factor * link.bytes_per_s}) for link in outer),
        )
        return self.model_copy(update={"links": links})

    def at_least(self, num_devices: int) -> "Cluster":
        """This cluster, or a larger one of its kind if it has fewer devices."""
        return self if self.num_devices >= num_devices else self.sized_for(num_devices)

    def sized_for(self, num_devices: int) -> "Cluster":
        """A cluster of this kind with just enough nodes."""
        per_node = min(self.devices_per_node, num_devices)
        nodes = -(-num_devices // per_node)
        update = {
            "num_nodes": nodes,
            "devices_per_node": per_node,
            "billing_unit": self.billing_unit or (self.devices_per_node if per_node < self.devices_per_node else None),
            "links": self._links_of(nodes * per_node),
            "torus": None,
        }
        return Cluster.model_validate({**self.model_dump(), **update})

    def exactly(self, num_devices: int) -> "Cluster":
        """A cluster of this kind with exactly `num_devices`, the most per node that divide them."""
        limit = min(self.devices_per_node, num_devices)
        per_node = next(number for number in range(limit, 0, -1) if num_devices % number == 0)
        update = {
            "num_nodes": num_devices // per_node,
            "devices_per_node": per_node,
            "billing_unit": self.billing_unit or (self.devices_per_node if per_node < self.devices_per_node else None),
            "links": self._links_of(num_devices),
            "torus": None,
        }
        return Cluster.model_validate({**self.model_dump(), **update})

    def _links_of(self, num_devices: int) -> tuple[Link, ...] | None:
        """Levels that join `num_devices`; the outermost is fitted to them."""
        if self.links is None:
            return None
        outermost = next((link for link in self.links if link.devices >= num_devices), self.links[-1])
        inner_links = tuple(link for link in self.links if link.devices < num_devices and link is not outermost)
        inner_devices = inner_links[-1].devices if inner_links else 1
        return (
            *inner_links,
            outermost.model_copy(update={"devices": -(-num_devices // inner_devices) * inner_devices}),
        )


def _facts_of(fields: Any) -> DeviceFacts:
    """Validate device facts. Raises SpecError with every problem."""
    try:
        return DeviceFacts.model_validate(fields)
    except ValidationError as error:
        raise SpecError(
            replace(problem, path=f"device.{problem.path}".rstrip(".")) for problem in problems_of(error)
        ) from None


def parse_cluster(fields: Any) -> Cluster:
    """Parse a cluster of one kind of nodes. Raises SpecError with every problem."""
    if isinstance(fields, dict) and "pools" in fields:
        raise SpecError(pools_problem())
    try:
        return Cluster.model_validate(fields)
    except ValidationError as error:
        raise SpecError(under_cluster_path(problems_of(error))) from None


def pools_problem() -> Problem:
    """Problem of pools given to a planner for one kind of nodes."""
    return Problem("unsupported", "cluster.pools", None, "has several pools, and a module is planned for one",
                   "describe one pool as the cluster")  # fmt: skip


def under_cluster_path(problems: Iterable[Problem]) -> list[Problem]:
    """The problems, with paths under `cluster`."""
    return [replace(problem, path=".".join(filter(None, ("cluster", problem.path)))) for problem in problems]

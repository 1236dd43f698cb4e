"""The cluster of a plan's options: read from a file, or hypothetical."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.cli.failures import Misuse

if TYPE_CHECKING:
    from moe.plan import Cluster, Pools


@dataclass(frozen=True)
class ClusterOptions:
    """Options as given; None if left out."""

    cluster: Path | None
    num_nodes: int | None
    devices_per_node: int | None
    device: str | None
    memory: str | None
    price: str | None
    billing_unit: int | None = None

    def read(self) -> "Cluster | Pools | None":
        """The cluster that they describe; None if none. Raises Misuse, SpecError, OSError."""
        is_imagined = any(value is not None for value in (self.num_nodes, self.devices_per_node, self.device))
        if self.cluster is not None:
            if is_imagined or any(value is not None for value in (self.memory, self.price, self.billing_unit)):
                raise Misuse("--cluster describes a whole cluster; omit --num-nodes and the other cluster options")
            from moe.plan import read_cluster

            return read_cluster(self.cluster)
        options = (("--memory", self.memory), ("--price", self.price), ("--billing-unit", self.billing_unit))
        for option, value in options:
            if value is not None and not is_imagined:
                raise Misuse(f"{option} applies to a hypothetical cluster; add --num-nodes and --device")
        return self._hypothetical_cluster() if is_imagined else None

    def _hypothetical_cluster(self) -> "Cluster":
        from moe.plan import DEVICES
        from moe.plan.cluster.cluster import FACTS, parse_cluster

        device_text = "cpu" if self.device is None else self.device
        device = self._facts() if device_text.lstrip().startswith("{") else device_text
        if isinstance(device, str) and device not in DEVICES:
            raise Misuse(
                f"--device (={device!r}) must be a known device type; use one of {', '.join(DEVICES)}, "
                f"or describe it: --device '{FACTS}'"
            )
        fields = {
            "num_nodes": self.num_nodes or 1, "devices_per_node": self.devices_per_node or 1, "device": device,
            "memory_bytes": None if self.memory is None else _num_bytes(self.memory),
            "price_per_hour": None if self.price is None else _amount(self.price),
            "billing_unit": self.billing_unit,
        }  # fmt: skip
        return parse_cluster({name: value for name, value in fields.items() if value is not None})

    def _facts(self) -> "dict[str, Any]":
        from moe.spec.files import parse_text

        facts: dict[str, Any] = parse_text(self.device or "", "--device")
        return facts


def _amount(text: str) -> float:
    """Parse `2.50`. Raises Misuse unless it is a positive amount."""
    from math import inf

    try:
        amount = float(text)
    except ValueError:
        amount = 0.0
    if not 0 < amount < inf:
        raise Misuse(f"--price (={text!r}) must be an amount of money above 0; write it as 2.50")
    return amount


def _num_bytes(text: str) -> int:
    """Parse `80GB`, `141 GiB`, `512MiB`, `1000000`. Raises Misuse for anything else."""
    import re
    from decimal import Decimal

    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
             "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text, re.ASCII)
    num_bytes = 0
    if match is not None and match[2].upper() in units:
        num_bytes = int(Decimal(match[1]) * units[match[2].upper()])
    if num_bytes < 1:
        raise Misuse(f"--memory (={text!r}) must be an amount of memory; write it as 80GB or 80GiB")
    return num_bytes

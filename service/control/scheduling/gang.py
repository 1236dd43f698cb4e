"""Gang: workers that start together or not at all."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Gang:
    """Workers that start together or not at all, and the resources of each."""

    workers: int
    cpus_per_worker: int
    gpus_per_worker: int
    pool: str = ""
    """Node pool that it runs on; "" on a standing Ray cluster."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Gang":
        return cls(
            int(fields["workers"]),
            int(fields.get("cpus_per_worker", 1)),
            int(fields.get("gpus_per_worker", 0)),
            str(fields.get("pool", "")),
        )

    def __str__(self) -> str:
        return describe_workers(self.workers, self.cpus_per_worker, self.gpus_per_worker)


def describe_workers(workers: int, cpus: int, gpus: int) -> str:
    """`2 workers of 1 CPU and 1 GPU each`."""
    worker_needs = f"{cpus} CPU{'s' if cpus > 1 else ''}" + (f" and {gpus} GPU" if gpus else "")
    return f"{workers} worker{'s' if workers > 1 else ''} of {worker_needs} each"

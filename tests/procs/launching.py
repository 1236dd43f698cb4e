"""An attempt's launch, for a driver that a test starts."""

from pathlib import Path
from typing import Any

from pydantic import SecretStr

from moe.plan import Cluster, plan_job
from moe.spec import JobSpec
from service.control.scheduling.requests import new_job_id
from service.wire.launch import Launch


def launch(folder: Path, events_url: str = "http://127.0.0.1:9", **changes: Any) -> Launch:
    """A launch of a small job, whose storage and cache are below the folder."""
    spec = JobSpec.parse(
        {"name": "small", "model": {"preset": "gshard-tiny"}, "data": {"corpus": "catalogs"},
         "train": {"num_steps": 5, "batch_tokens": 1024}, **changes}
    )  # fmt: skip
    cluster = Cluster(num_nodes=1, devices_per_node=2, device="cpu", memory_bytes=8 << 30)
    return Launch(
        job_id=new_job_id(), attempt=1, spec=spec, plan=plan_job(spec, cluster, 1), gpus_per_worker=0,
        storage=str(folder / "storage"), cache=str(folder / "cache"), events_url=events_url,
        token=SecretStr("0123456789abcdef"), max_failures=3,
    )  # fmt: skip

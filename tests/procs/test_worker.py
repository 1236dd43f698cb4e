"""A worker's run and the result that it makes of it."""

from pathlib import Path

import pytest
import torch
from pydantic import SecretStr

from moe.plan import Cluster, plan_job
from moe.spec import JobSpec
from service.run.worker import _run
from service.wire.attempt_folder import AttemptFolder
from service.wire.launch import Launch
from tests.procs.recording import recorder
from tests.unit.train_runs import corpus, job


@pytest.mark.usefixtures("node")
def test_a_loss_that_is_no_number_is_a_result_after_which_nothing_is_tried_again(tmp_path: Path) -> None:
    """What a result is that is not to be tried again, tests/ray/test_two_nodes.py shows of another."""
    train = {
        "num_steps": 40, "optimizer": {"name": "adamw", "peak_lr": 100, "weight_decay": 1e30},
        "schedule": {"warmup_steps": 0, "decay": "constant"},
    }  # fmt: skip
    spec: JobSpec = job(corpus(tmp_path), train=train)
    cluster = Cluster(num_nodes=1, devices_per_node=1, device="cpu", memory_bytes=8 << 30)
    launch = Launch(
        job_id="job-aaaaaaaaaaaa", attempt=1, spec=spec, plan=plan_job(spec, cluster, 1), gpus_per_worker=0,
        storage=str(tmp_path / "storage"), cache=str(tmp_path / "cache"), data_roots=(str(tmp_path),),
        events_url="http://127.0.0.1:9", token=SecretStr("0123456789abcdef"), max_failures=3,
    )  # fmt: skip
    spool = recorder(launch.events_url, launch.storage, "g0.rank-0")
    result = _run(
        launch, AttemptFolder(launch.storage, 1), group=0, resumed_step=0, device=torch.device("cpu"), recorder=spool
    )
    spool.close(patience_s=0.0)
    assert (result.outcome, result.retryable) == ("failed", False)
    assert f"of step {result.step + 1} is not finite" in result.message
    assert "the last good checkpoint is" in result.message

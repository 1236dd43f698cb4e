"""A worker's parts: its run and result, its device, progress of its data, files of its attempt."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from pydantic import SecretStr

from moe.plan import Cluster, plan_job
from moe.spec import JobSpec, ResourcesSpec
from service.run.attempt_keeper import AttemptKeeper
from service.run.device import device_fault, device_of
from service.run.preparation import PreparationProgress
from service.run.worker import _run
from service.wire.attempt_folder import AttemptFolder
from service.wire.launch import Launch
from tests.procs.launching import launch
from tests.procs.receiver import Receiver
from tests.procs.recording import recorder
from tests.unit.train_runs import corpus, job


@pytest.mark.usefixtures("node")
def test_a_loss_that_is_no_number_is_a_result_after_which_nothing_is_tried_again(tmp_path: Path) -> None:
    """tests/ray/test_two_nodes.py shows that such a result of another fault is not retried."""
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


def test_a_gpu_that_is_held_and_not_there_is_a_fault_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # before torch looks: none on any machine
    kind = ResourcesSpec(num_workers=1).trains_on(1)
    fault = device_fault(kind)
    assert fault is not None
    assert "was assigned a GPU but finds none: torch " in fault
    assert "resources.device=cpu" in fault


@pytest.mark.parametrize(("device", "gpus"), [("cpu", 1), ("auto", 0)])
def test_cores_are_trained_on_where_that_is_said_or_no_gpu_is_held(device: str, gpus: int) -> None:
    kind = ResourcesSpec(num_workers=1, device=device).trains_on(gpus)
    assert device_fault(kind) is None
    assert device_of(kind).type == "cpu"


def test_progress_is_recorded_at_each_stage_and_seldom_within_one(tmp_path: Path, node: Path) -> None:
    time_s = 1_000.0
    receiver = Receiver().start()
    try:
        run = recorder(receiver.url, str(tmp_path / "storage"), "driver")
        progress = PreparationProgress(run, lambda: time_s)
        for tenth in range(100):
            time_s = 1_000.0 + tenth / 10
            progress("reading", tenth / 200, 1_000 * tenth)
        progress("encoding", 0.5, 0)
        progress("encoding", None, 7_000)
        time_s += 2.5
        progress("encoding", None, 12_000)
        run.close()
        entries = [record["data"] for record in receiver.records["driver"] if record["kind"] == "log"]
    finally:
        receiver.stop()
    assert [data["preparing"]["stage"] for data in entries] == ["reading"] * 5 + ["encoding"] * 2
    assert entries[1]["preparing"] == {"stage": "reading", "share": 0.1, "num_done": 20_000, "seconds": 2.0}
    assert entries[1]["message"] == "preparing data: reading, 10%"
    assert entries[-1]["message"] == "preparing data: encoding, 12,000 texts"
    assert json.loads(json.dumps(entries)) == entries


def test_a_launch_and_the_numbers_of_groups_outlive_the_folder(tmp_path: Path) -> None:
    first_launch = launch(tmp_path)
    folder = AttemptFolder(first_launch.storage, first_launch.attempt)
    path = folder.write_launch(first_launch)
    keeper = AttemptKeeper(path)
    assert [folder.begin_group(0), folder.begin_group(0)] == [0, 1]
    assert not keeper.look()
    shutil.rmtree(first_launch.storage)
    assert keeper.look()
    assert not keeper.look()
    assert AttemptFolder.open_launch(path)[1] == first_launch, "a new worker group reads it"
    assert Path(path).stat().st_mode & 0o777 == 0o600
    assert folder.begin_group(0) == 2, "and no group has the number of another"

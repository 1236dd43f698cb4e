"""Verification of checkpoints: a fault for each damaged file, few at a time, and none of a checkpoint that its job
removes meanwhile."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from moe.storage.folder import Folder
from moe.train.checkpoint import marker as markers
from moe.train.checkpoint.marker import Marker
from service.cli.view.amounts import num_bytes
from service.cli.view.checkpoints import verification_text
from service.control.errors import NotFound, Unavailable
from service.control.report.verification import MAX_VERIFICATIONS, Verifications
from tests.processes import DEADLINE_S
from tests.service.checkpoints import commit
from tests.service.control_plane import ControlPlane
from tests.service_cli.command import shardyard
from tests.service_cli.terminal import on_a_terminal

NAME = "step-00000004.a1.g0"
SHARD = f"checkpoints/{NAME}/__0_0.distcp"


@pytest.fixture(scope="module")
def job(plane: ControlPlane) -> dict[str, Any]:
    """A job that has ended, with checkpoints of steps 2 and 4."""
    job = plane.finished_job()
    for step in (2, 4):
        commit(job["storage"], step)
    return job


def verify(plane: ControlPlane, job: dict[str, Any], checkpoint: str) -> Any:
    return plane.http.post(f"/v1/jobs/{job['id']}/checkpoints/{checkpoint}/verification")


def faults(plane: ControlPlane, job: dict[str, Any]) -> list[tuple[str, str, int | None]]:
    verification = verify(plane, job, "4").json()
    assert verification["num_files"] == 2
    assert all(fault["rule"] and fault["remedy"] for fault in verification["faults"])
    return [(fault["code"], fault["path"], fault.get("value")) for fault in verification["faults"]]


@pytest.mark.parametrize("checkpoint", ["4", NAME])
def test_an_intact_checkpoint_has_no_faults(plane: ControlPlane, job: dict[str, Any], checkpoint: str) -> None:
    verification = verify(plane, job, checkpoint).json()
    assert verification.pop("seconds") >= 0
    assert verification == {"name": NAME, "step": 4, "num_files": 2, "num_bytes": 102, "faults": []}


def test_each_damage_is_a_fault_of_its_file(plane: ControlPlane, job: dict[str, Any]) -> None:
    shard = Path(job["storage"], SHARD)
    content = shard.read_bytes()
    damages = {
        bytes([content[0] ^ 1]) + content[1:]: ("corrupt", SHARD, None),
        content[:-1]: ("corrupt", SHARD, 99),
        content + b"\0": ("corrupt", SHARD, 101),
        b"": ("corrupt", SHARD, 0),
    }
    for damaged, fault in damages.items():
        shard.write_bytes(damaged)
        assert faults(plane, job) == [fault]
    shard.unlink()
    assert faults(plane, job) == [("missing", SHARD, None)]
    shard.mkdir()
    assert faults(plane, job) == [("unreadable", SHARD, None)]
    shard.rmdir()
    shard.write_bytes(content)
    assert faults(plane, job) == []


def test_a_damaged_marker_is_a_fault(plane: ControlPlane, job: dict[str, Any]) -> None:
    path = Path(job["storage"], "checkpoints", NAME + markers.SUFFIX)
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"size_bytes": 100', b'"size_bytes": 101'))
    verification = verify(plane, job, NAME).json()
    assert [fault["path"] for fault in verification["faults"]] == [f"checkpoints/{path.name}"]
    path.write_bytes(content)


def test_a_marker_cannot_lead_out_of_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    folder = Folder(f"{tmp_path}/checkpoints", root=str(tmp_path))
    path = "../../secret"
    marker = Marker(
        step=3, attempt=1, group=0, num_workers=1, created_at="", files={path: markers.seal(b"secret")}
    )  # fmt: skip
    folder.write(marker.name + markers.SUFFIX, marker.to_bytes())
    verification = asyncio.run(Verifications(lambda: False).verify(folder, "3"))
    assert (verification.num_bytes, [fault.code for fault in verification.faults]) == (0, ["corrupt"])


@pytest.mark.parametrize("checkpoint", ["3", "-4", "step-00000003.a1.g0", "%2e%2e", "newest"])
def test_a_step_without_a_checkpoint_is_not_found(plane: ControlPlane, job: dict[str, Any], checkpoint: str) -> None:
    answer = verify(plane, job, checkpoint)
    assert (answer.status_code, answer.json()["type"]) == (404, "urn:shardyard:problem:not-found")


def test_the_command_fails_for_a_damaged_checkpoint(plane: ControlPlane, job: dict[str, Any]) -> None:
    assert shardyard("checkpoints", job["id"], "--verify", "2", url=plane.url).returncode == 0
    run = Path(job["storage"], "checkpoints", "step-00000002.a1.g0", "run.json")
    run.write_bytes(b"[]")
    result = shardyard("checkpoints", job["id"], "--verify", "2", url=plane.url)
    assert (result.returncode, result.stderr) == (1, "")
    assert f"  checkpoints/step-00000002.a1.g0/{run.name} " in result.stdout


def test_a_terminal_shows_what_is_verified(plane: ControlPlane, job: dict[str, Any]) -> None:
    _, screen = on_a_terminal(100, "checkpoints", job["id"], "--verify", "4", url=plane.url)
    items = plane.http.get(f"/v1/jobs/{job['id']}/checkpoints").json()["items"]
    assert f"{items[-1]['name']}, 2 files, {num_bytes(items[-1]['size_bytes'])}" in screen
    assert "7" in verification_text("7", items)


def test_a_checkpoint_that_its_job_removes_meanwhile_is_not_found(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / markers.FOLDER))
    files = {f"{number}.distcp": b"content" for number in range(40)}
    marker = Marker(
        step=3, attempt=1, group=0, num_workers=1, created_at="",
        files={path: markers.seal(content) for path, content in files.items()},
    )  # fmt: skip
    for path, content in files.items():
        folder.write(f"{marker.name}/{path}", content)
    folder.write(marker.name + markers.SUFFIX, marker.to_bytes())
    lock = threading.Lock()

    def remove_once() -> bool:
        with lock:
            if (tmp_path / markers.FOLDER / marker.name).exists():
                folder.remove(marker.name + markers.SUFFIX)
                folder.remove(marker.name)
        return False

    with pytest.raises(NotFound):
        asyncio.run(Verifications(remove_once).verify(folder, "3"))


def test_few_are_verified_at_a_time_and_a_cancelled_one_frees_its_place(tmp_path: Path) -> None:
    commit(tmp_path, 3)
    folder = Folder(str(tmp_path / markers.FOLDER))
    reading, may_go_on = threading.Semaphore(0), threading.Event()

    def hold() -> bool:
        reading.release()
        may_go_on.wait(DEADLINE_S)
        return False

    async def run() -> None:
        verifications = Verifications(hold)
        tasks = [asyncio.create_task(verifications.verify(folder, "3")) for _ in range(MAX_VERIFICATIONS)]
        for _ in range(2 * MAX_VERIFICATIONS):  # both files of each
            assert await asyncio.to_thread(reading.acquire, timeout=DEADLINE_S)
        with pytest.raises(Unavailable) as refusal:
            await verifications.verify(folder, "3")
        assert "retry-after" in refusal.value.headers
        tasks[0].cancel()
        await asyncio.wait({tasks[0]})
        next_task = asyncio.create_task(verifications.verify(folder, "3"))
        may_go_on.set()
        assert [(await task).is_intact for task in (tasks[1], next_task)] == [True, True]

    asyncio.run(run())

"""`shardyard download`: a job's files in a folder of whoever asks."""

import json
from pathlib import Path

from tests.service.checkpoints import commit, fault_of
from tests.service.control_plane import ControlPlane
from tests.service_cli.command import shardyard
from tests.service_cli.test_commands import submit


def test_a_job_in_a_folder(plane: ControlPlane, job_file: Path, tmp_path: Path) -> None:
    job_id = submit(plane, job_file)
    storage = Path(plane.await_state(job_id, "succeeded")["storage"])
    name = commit(storage, 5)
    folder = tmp_path / "mine" / job_id
    done = shardyard("download", job_id, folder.parent, url=plane.url)
    assert (done.returncode, done.stdout.startswith(f"{folder}: 5 files, ")) == (0, True), done.stderr
    assert fault_of(folder, name) is None
    assert (folder / "spec.json").read_bytes() == (storage / "spec.json").read_bytes()
    assert not list(folder.glob("attempts/1/launch*"))
    again = json.loads(shardyard("download", job_id, folder.parent, "--json", url=plane.url).stdout)
    assert (again["folder"], again["fetched"], len(again["kept"]), again["gone"]) == (str(folder), [], 5, [])
    only = shardyard("download", job_id, tmp_path / "only", "--kind", "result", "--json", url=plane.url)
    assert json.loads(only.stdout)["fetched"] == ["attempts/1/result.json"]


def test_what_cannot_be_had(plane: ControlPlane, job_file: Path, tmp_path: Path) -> None:
    assert shardyard("download", "job-aaaaaaaaaaaa", tmp_path, url=plane.url).returncode == 2
    job_id = submit(plane, job_file)
    wrong = shardyard("download", job_id, tmp_path, "--kind", "keys", url=plane.url)
    assert (wrong.returncode, "'spec', 'result', 'checkpoints', 'logs'" in wrong.stderr) == (2, True)
    (tmp_path / "file").touch()
    plane.await_state(job_id, "succeeded")
    blocked = shardyard("download", job_id, tmp_path / "file", url=plane.url)
    assert (blocked.returncode, str(tmp_path / "file") in blocked.stderr) == (2, True)


def test_two_jobs_in_one_place_are_kept_apart(plane: ControlPlane, job_file: Path, tmp_path: Path) -> None:
    stored = {}
    for step in (5, 4):
        job_id = submit(plane, job_file)
        storage = Path(plane.await_state(job_id, "succeeded")["storage"])
        stored[job_id] = (storage, commit(storage, step))
        assert shardyard("download", job_id, tmp_path / "models", url=plane.url).returncode == 0
    for job_id, (storage, name) in stored.items():
        folder = tmp_path / "models" / job_id
        assert [path.name for path in (folder / "checkpoints").iterdir() if path.is_dir()] == [name]
        assert fault_of(folder, name) is None
        result = "attempts/1/result.json"
        assert (folder / result).read_bytes() == (storage / result).read_bytes()

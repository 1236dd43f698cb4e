"""The control plane's own process is light, and its errors travel."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from moe.spec.errors import Problem
from service.control import errors
from service.control.launcher.launcher import LauncherUnavailable, LaunchRefusal

ROOT = Path(__file__).parents[2]


SERVE = """
import json, os, sys
from fastapi.testclient import TestClient
from pathlib import Path
from service.control.app import create_app
from service.settings import Settings
from tests.service.control_plane import spec
from tests.service.controllers import local_cluster
folder, module = Path(sys.argv[1]), "notes_who_imports_it"
def of_module(name):
    return {"model": {"kind": "module", "build": name + ":build"}, "train": {"num_steps": 1},
            "data": {"corpus": "module", "batches": name + ":batch"}, "resources": {"num_workers": 2}}
settings = Settings(state_dir=folder, controller_interval_s=60, allowed_code=(module + ":build", module + ":batch"))
launcher = local_cluster(folder)
with TestClient(create_app(settings, launcher), base_url="http://127.0.0.1") as client:
    assert client.post("/v1/jobs", json=of_module("tests.service.users_module")).status_code == 422
    assert not (folder / "imported-by").exists()
    for job in (spec(resources={"num_workers": 1}), of_module(module)):
        answer = client.post("/v1/plans", json=job)
        assert answer.status_code == 200, answer.text
    for job in (spec(resources={"num_workers": 100}), of_module(module)):
        assert client.post("/v1/jobs", json=job).status_code == 201
        job_id = client.get("/v1/jobs").json()["items"][0]["id"]
        for path in ("", "/metrics", "/checkpoints", "/logs"):
            assert client.get(f"/v1/jobs/{job_id}{path}").status_code == 200
    assert client.get(f"/v1/jobs/{job_id}/plan").status_code == 200
launcher.end_all()
heavy = ("torch", "ray", "tokenizers", "pyarrow", "pandas", "moe.sharding", "tests.service.users_module", module)
print(json.dumps([os.getpid(), [name for name in heavy if name in sys.modules]]))
"""


@pytest.mark.slow
def test_a_control_plane_that_served_has_loaded_neither_torch_nor_ray_nor_a_users_module(tmp_path: Path) -> None:
    """The module notes who imports it: a process that plans, and never the one that serves."""
    (tmp_path / "notes_who_imports_it.py").write_text(
        f"import os\nwith open({str(tmp_path / 'imported-by')!r}, 'a') as notes:\n    print(os.getpid(), file=notes)\n"
        "from tests.service.users_module import batch, build\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", SERVE, str(tmp_path)], capture_output=True, text=True, check=False,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    pid, modules = json.loads(result.stdout.splitlines()[-1])
    assert modules == []
    importers = (tmp_path / "imported-by").read_text().split()
    assert importers
    assert str(pid) not in importers


@pytest.mark.parametrize(
    "error",
    [
        errors.Conflict("words", Problem("conflict", "a", 1, "b"), headers={"x": "y"}, members={"next_seq": 3}),
        errors.NotFound("words"),
        LauncherUnavailable("words"),
        LaunchRefusal("words"),
    ],
)
def test_errors_pickle(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))

"""The control plane's own process is light, and its errors travel."""

import pickle
import subprocess
import sys

import pytest

from moe.spec.errors import Problem
from service.control import errors
from service.control.launcher.launcher import LauncherUnavailable, LaunchRefusal


def test_a_control_plane_that_served_has_loaded_neither_torch_nor_ray(tmp_path: object) -> None:
    code = f"""
import sys
from fastapi.testclient import TestClient
from pathlib import Path
from service.control.app import create_app
from service.settings import Settings
from tests.service.control_plane import NODE, spec
from tests.service.local_launcher import LocalLauncher
launcher = LocalLauncher(Path({str(tmp_path)!r}) / "cluster")
launcher.set_nodes(NODE)
settings = Settings(state_dir={str(tmp_path)!r}, controller_interval_s=60)
with TestClient(create_app(settings, launcher), base_url="http://127.0.0.1") as client:
    answer = client.post("/v1/plans", json=spec())
    assert answer.status_code == 200, answer.text
    assert client.post("/v1/jobs", json=spec(resources={{"num_workers": 100}})).status_code == 201
    job = client.get("/v1/jobs").json()["items"][0]["id"]
    for path in ("", "/metrics", "/checkpoints", "/logs"):
        assert client.get(f"/v1/jobs/{{job}}{{path}}").status_code == 200
print([name for name in ("torch", "ray", "tokenizers", "pyarrow", "pandas") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


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
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))

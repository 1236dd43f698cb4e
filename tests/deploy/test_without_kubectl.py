"""Where kubectl is missing: a newcomer's run says so and goes on, CI's does not pass over it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.deployment import ROOT

ONE_TEST = "tests/deploy/test_manifests.py::test_one_control_plane_at_a_time"


@pytest.mark.sample(1)
@pytest.mark.parametrize(("ci", "outcome", "word"), [("", 0, "2 skipped"), ("true", 1, "CI must not pass over it")])
def test_missing_kubectl(tmp_path: Path, ci: str, outcome: int, word: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", ONE_TEST],
        env={**os.environ, "PATH": str(tmp_path), "CI": ci},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == outcome, run.stdout + run.stderr
    assert "kubectl, which renders the manifests, is not installed" in run.stdout
    assert word in run.stdout

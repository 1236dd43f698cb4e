"""`plan --module`: a module of one's own planned from the folder that it lies in, by no control plane."""

import json
from pathlib import Path

import pytest

from tests.service_cli.command import shardyard

CODE = "tests.service.users_module"
MODULE = f"--module={CODE}:build", f"--sample={CODE}:sample"


@pytest.mark.slow
def test_a_module_is_planned_explained_and_kept(tmp_path: Path) -> None:
    cluster, hints, kept = tmp_path / "cluster.yaml", tmp_path / "hints.yaml", tmp_path / "plan.json"
    cluster.write_text("{num_nodes: 1, devices_per_node: 2}")
    hints.write_text('"items.weight": {split: 0}')
    done = shardyard("plan", *MODULE, f"--cluster={cluster}", f"--hints={hints}", f"--save={kept}")
    assert done.returncode == 0, done.stderr
    assert "items.weight" in done.stdout
    plan = json.loads(kept.read_text())
    assert (plan["mesh"], plan["parameters"]["items.weight"]) == ([["devices", 2]], "S(0)")
    again = shardyard("plan", *MODULE, f"--cluster={cluster}", f"--hints={hints}", "--json")
    assert again.stdout == kept.read_text()
    imagined = shardyard("plan", *MODULE, "--devices-per-node=3", "--json")
    assert json.loads(imagined.stdout)["mesh"] == [["devices", 3]]


def test_what_is_wrong_is_told_with_its_place(tmp_path: Path) -> None:
    on = "--devices-per-node=2"
    sample = f"--sample={CODE}:sample"
    raises = shardyard("plan", f"--module={CODE}:raises", sample, on)
    assert raises.returncode == 2
    assert "raise KeyError" in raises.stderr  # the traceback, as the user's own code is at fault
    assert (
        f"--module (='{CODE}:raises') cannot be planned: KeyError: 'no such layer' (users_module.py:" in raises.stderr
    )
    prints = shardyard("plan", f"--module={CODE}:prints", sample, on, "--json")
    assert json.loads(prints.stdout)["mesh"] == [["devices", 2]]
    assert "not this" in prints.stderr
    hints = tmp_path / "hints.yaml"
    hints.write_text('"itms.weight": {split: 0}')
    unknown = shardyard("plan", *MODULE, on, f"--hints={hints}")
    assert (unknown.returncode, "items.weight" in unknown.stderr) == (2, True)
    hints.write_text("- items.weight")
    assert "must map names to hints" in shardyard("plan", *MODULE, on, f"--hints={hints}").stderr


def test_options_that_do_not_go_together_are_told_of() -> None:
    for options, words in {
        (): "give FILE, a job's id, diff and two plans, or --module",
        ("--sample=a:b",): "--sample and --hints require --module",
        ("--module=a:b", "--devices-per-node=2"): "--module requires --sample, the function that returns one batch",
        ("--module=a:b", "--sample=a:c"): "--module needs a cluster",
        (
            "job.yaml",
            "--module=a:b",
        ): "--module accepts only --sample, cluster options, --hints, --save, --draw and --json",
        ("--module=a.b", "--sample=a:c", "--devices-per-node=2"): "--module (='a.b') must be module:function",
        ("--module=a:b", "--sample=a:b.c", "--devices-per-node=2"): "--sample (='a:b.c') must be module:function",
    }.items():
        done = shardyard("plan", *options)
        assert (done.returncode, words in done.stderr) == (2, True), done.stderr

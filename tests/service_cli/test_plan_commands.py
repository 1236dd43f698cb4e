"""`plan` and `calibrate`: what is printed of layouts and of machines, and the exit code."""

import json
import re
from pathlib import Path

import pytest

from moe.calibrate.rates import machine
from moe.plan import Calibration
from tests.service.control_plane import ControlPlane
from tests.service_cli.command import shardyard

EXAMPLE = Path(__file__).parents[2] / "examples" / "translate-100-to-english.yaml"


def test_plans_of_imagined_clusters_need_no_control_plane(tmp_path: Path) -> None:
    done = shardyard("plan", EXAMPLE, "--devices-per-node=2", "--full", url="http://127.0.0.1:1")
    assert done.returncode == 0
    assert re.search(r"mesh +expert_data \d x expert \d", done.stdout)
    assert re.search(r"expert degree \d: \d of 8 experts", done.stdout)
    for part in (
        "verdict",
        "parameters, and the",
        "memory of the fullest",
        "time of a step",
        "why",
        "next best",
        "tokens/s",
    ):
        assert part in done.stdout
    wide = tmp_path / "wide.yaml"
    wide.write_text(
        "name: wide\nmodel: {preset: gshard-128e-12l}\ndata: {corpus: catalogs}\n"
        "train: {num_steps: 10, batch_tokens: 262144}\nresources: {num_workers: 16}\n"
    )
    on = ("--num-nodes=2", "--devices-per-node=8", "--device=h100")
    planned = shardyard("plan", wide, *on, "--json")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["num_workers"] == 16
    small = shardyard("plan", wide, *on, "--memory=1GB")
    assert small.returncode == 2
    assert "must hold the model" in small.stderr
    assert shardyard("plan", EXAMPLE, "--device=abacus").returncode == 2
    assert "write it as 80GB" in shardyard("plan", EXAMPLE, "--device=cpu", "--memory=much").stderr


@pytest.mark.parametrize("name", ["job-typo.yaml", "job-a.json"])
def test_a_file_that_is_not_there_is_asked_of_no_control_plane(name: str) -> None:
    done = shardyard("plan", name, url="http://127.0.0.1:1")
    assert done.returncode == 2
    assert done.stderr == f"shardyard: {name}: No such file or directory\n"


DEEPSEEK = EXAMPLE.parent / "deepseek-v3-1024-h100.yaml"


@pytest.mark.slow
def test_a_published_model_is_planned_on_a_laptop(tmp_path: Path) -> None:
    done = shardyard("plan", DEEPSEEK, "--full", url="http://127.0.0.1:1")
    assert done.returncode == 0, done.stderr
    assert "on                 128 nodes of 8 h100" in done.stdout
    assert re.search(r"layers\.\*\.feed_forward\.moe\.\s*experts\.w_in +256 / expert \d+ x 7,168", done.stdout)
    request = tmp_path / "peer.yaml"
    request.write_text(f"{DEEPSEEK.read_text()}\nprofile: peer\n")
    peer = shardyard("plan", request, "--full", url="http://127.0.0.1:1")
    assert "run by             Megatron-Core" in peer.stdout
    assert "not yet: the layout of a peer" in peer.stdout
    request.write_text(f"{DEEPSEEK.read_text()}\nprofile: theirs\n")
    done_wrong = shardyard("plan", request, url="http://127.0.0.1:1")
    assert (
        done_wrong.returncode,
        "profile (='theirs') must be one of ours, peer, torchtitan, torchtitan-25.06" in done_wrong.stderr,
    ) == (2, True)
    assert "not yet" not in done.stdout
    assert re.search(r"layer with experts: experts +58 +654 B", done.stdout)
    assert re.search(r"the run +\d+ days +441,000 steps, 14.8 T tokens", done.stdout)
    assert "could not" not in done.stderr
    few = tmp_path / "cluster.yaml"
    few.write_text("num_nodes: 1\ndevices_per_node: 8\ndevice: h100\n")
    too_small = shardyard("plan", DEEPSEEK, "--cluster", few, "--num-workers=8")
    assert too_small.returncode == 2
    assert re.search(r"GiB too much; [\d.,]+ GiB of it is optimizer; use [\d,]+ workers of this kind", too_small.stderr)


def test_a_grid_and_the_smallest_cluster(tmp_path: Path) -> None:
    on = ("--num-nodes=2", "--devices-per-node=8", "--device=h100")
    grid = shardyard("plan", EXAMPLE, *on, "--what-if", "experts=8,16,nodes=1,2")
    assert grid.returncode == 0, grid.stderr
    rows = [line.split()[:2] for line in grid.stdout.splitlines()[1:]]
    assert rows == [["8", "1"], ["8", "2"], ["16", "1"], ["16", "2"]]
    wrong = shardyard("plan", EXAMPLE, *on, "--what-if", "colour=8")
    assert wrong.returncode == 2
    assert "write it as experts=128,256,nodes=64" in wrong.stderr
    no_number = shardyard("plan", EXAMPLE, *on, "--what-if", "nodes=1,two")
    assert no_number.returncode == 2
    assert "nodes=two" in no_number.stderr
    large = tmp_path / "large.yaml"
    large.write_text(
        "name: paper\nmodel: {preset: gshard-2048e-36l}\ndata: {corpus: catalogs}\n"
        "train: {num_steps: 10, batch_tokens: 4194304, optimizer: {name: adafactor}}\n"
        "resources: {num_workers: 2048}\n"
    )
    fit = shardyard("plan", large, *on, "--fit", "--json")
    assert fit.returncode == 0, fit.stderr
    fitting = json.loads(fit.stdout)
    assert fitting["num_workers"] < 2048
    assert sum(v for k, v in fitting["memory"].items() if k != "limit") <= fitting["memory"]["limit"]


def test_a_grid_without_a_single_plan_is_a_failure() -> None:
    on = ("--num-nodes=1", "--devices-per-node=2", "--device=cpu")
    done = shardyard("plan", EXAMPLE, *on, "--what-if", "nodes=0")
    assert (done.returncode, "nodes" in done.stdout, done.stderr) == (2, True, "")
    assert shardyard("plan", EXAMPLE, *on, "--what-if", "nodes=0,1").returncode == 0


POOLS = """
pools:
- {name: old, num_nodes: 2, devices_per_node: 8, device: a100-80, price_per_hour: 1.5}
- {name: new, num_nodes: 1, devices_per_node: 8, device: h100, price_per_hour: 3.25}
- {name: single, num_nodes: 1, devices_per_node: 1, device: h200, price_per_hour: 3}
"""


def test_of_pools_the_cheapest_is_taken(tmp_path: Path) -> None:
    file, cheapest, kept = (tmp_path / name for name in ("cluster.yaml", "cheapest.json", "plan.json"))
    file.write_text(POOLS)
    on = ("--cluster", file)
    options = ("--goal=cost", "--full", f"--save={cheapest}")
    done = shardyard("plan", EXAMPLE, *on, *options, url="http://127.0.0.1:1", COLUMNS="200")
    assert done.returncode == 0, done.stderr
    assert "on               pool old, 2 nodes of 8 a100-80" in done.stdout
    assert re.search(r"money +12\.00 +per hour, 0\.0\d+ per million tokens, 0\.0\d+ for the run", done.stdout)
    assert re.search(r"pool new: 2 workers would take .* a million tokens\), [\d.]+% dearer", done.stdout)
    assert "pool single cannot hold it: resources (='2 workers') must be at most the number of devices" in done.stdout
    fastest = json.loads(shardyard("plan", EXAMPLE, *on, "--json").stdout)
    assert (fastest["pool"], fastest["money"]["per_hour"]) == ("new", 26)
    kept.write_text(json.dumps(fastest))
    compared = shardyard("plan", "diff", kept, cheapest, COLUMNS="200").stdout
    assert f"pool: new of {kept}, old of {cheapest}" in compared
    assert "money a million tokens: 0." in compared
    assert shardyard("plan", EXAMPLE, *on, "--against", kept).returncode == 0
    assert shardyard("plan", EXAMPLE, *on, "--goal=cost", "--against", kept).returncode == 2
    table = shardyard("plan", EXAMPLE, *on, "--what-if", "experts=8,16")
    assert [line.split()[:2] for line in table.stdout.splitlines()[1:]] == [["8", "new"], ["16", "new"]]
    of_nodes = shardyard("plan", EXAMPLE, *on, "--what-if", "nodes=2")
    assert (of_nodes.returncode, "the cluster has pools" in of_nodes.stderr) == (2, True)
    other = json.loads(shardyard("plan", EXAMPLE, *on, "--explain-against", "expert=1", "--json").stdout)
    assert (other["chosen"]["pool"], other["against"]["device_type"]) == ("new", "h100")
    smallest = json.loads(shardyard("plan", EXAMPLE, *on, "--fit", "--goal=cost", "--json").stdout)
    assert (smallest["pool"], smallest["num_workers"]) == ("single", 2)  # of "old" all 8 are paid
    file.write_text(POOLS.replace(", price_per_hour: 3}", "}"))
    unpriced = shardyard("plan", EXAMPLE, *on, "--goal=cost")
    assert unpriced.returncode == 2
    assert "cluster.pools[2].price_per_hour is required for pool single" in unpriced.stderr
    module = shardyard("plan", "--module=a:b", "--sample=a:c", *on)
    assert (module.returncode, "describe one pool as the cluster" in module.stderr) == (2, True)


def test_prices_and_goals_of_imagined_clusters() -> None:
    on = ("--devices-per-node=2", "--price=0.5")
    assert re.search(r"money +1\.00 +per hour, ", shardyard("plan", EXAMPLE, *on, "--full").stdout)
    whole = ("--devices-per-node=8", "--price=0.5", "--full")
    assert re.search(r"money +4\.00 +per hour, ", shardyard("plan", EXAMPLE, *whole).stdout)
    assert re.search(r"money +1\.00 +per hour, ", shardyard("plan", EXAMPLE, *whole, "--billing-unit=1").stdout)
    fixed = json.loads(shardyard("plan", EXAMPLE, *on, "--goal=time", "--json").stdout)
    assert fixed["reasons"][1].startswith("goal time had nothing to choose: the job says it")
    for given, told in (
        (("--devices-per-node=2", "--price=much"), "--price (='much') must be an amount of money above 0"),
        (("--billing-unit=1",), "--billing-unit applies to a hypothetical cluster; add --num-nodes and --device"),
        (("--price=2",), "--price applies to a hypothetical cluster; add --num-nodes and --device"),
        (("--devices-per-node=2", "--goal=fast"), "--goal (='fast') must be time or cost"),
    ):
        refused = shardyard("plan", EXAMPLE, *given)
        assert (refused.returncode, told in refused.stderr) == (2, True)


def test_a_device_may_be_given_by_its_facts() -> None:
    facts = (
        "{name: x100, memory_bytes: 80000000000, bfloat16_flops_per_s: 5.0e+14, memory_bytes_per_s: 2.0e+12, "
        "link_bytes_per_s: 3.0e+11}"
    )
    on = ("--devices-per-node=2", "--full")
    done = shardyard("plan", EXAMPLE, *on, f"--device={facts}", url="http://127.0.0.1:1", COLUMNS="200")
    assert done.returncode == 0, done.stderr
    assert "2 on x100" in done.stdout
    assert "kernels of x100 were never measured" in done.stdout
    for wrong, path in (
        ("{memory_bytes: 1", "line 1"),
        ("{memory_bytes: 1}", "cluster.device.bfloat16_flops_per_s"),
        ("[1]", "--device"),
    ):
        refused = shardyard("plan", EXAMPLE, *on, f"--device={wrong}")
        assert (refused.returncode, path in refused.stderr) == (2, True), refused.stderr


def test_a_kept_plan_says_what_it_was_made_for(tmp_path: Path) -> None:
    on = ("--num-nodes=1", "--devices-per-node=2", "--device=cpu")
    first, again = (shardyard("plan", EXAMPLE, *on, "--json").stdout for _ in range(2))
    assert first == again
    kept = tmp_path / "plan.json"
    kept.write_text(first)
    assert shardyard("plan", EXAMPLE, *on, "--against", kept).returncode == 0
    other = shardyard("plan", EXAMPLE, "--num-nodes=2", "--devices-per-node=2", "--device=cpu", "--against", kept)
    assert other.returncode == 2
    assert "was made for another cluster" in other.stderr
    kept.write_text(json.dumps({**json.loads(first), "profile": "peer"}))
    assert "was made for another profile" in shardyard("plan", EXAMPLE, *on, "--against", kept).stderr
    kept.write_text('{"version": 7}')
    assert shardyard("plan", EXAMPLE, *on, "--against", kept).returncode == 2


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ("pools:\n- {name: a, num_nodes: 1, devices_per_node: 1}\ndevice: cpu\n",
         "cluster.device (='cpu') applies to one kind of nodes, "
         "but there are pools; move it into the pools it applies to"),
        ("num_nodes: 1\ndevices_per_node: 8\ndevice: abacus\n", "cluster.device (='abacus') "
                                                            "is not a known device type"),
        ("num_nodes: 0\ndevices_per_node: 8\n", "cluster.num_nodes (=0) must be greater than 0"),
        ("num_nodes: 1\ndevices_per_node: 8\ncolour: red\n", "cluster.colour (='red') is not a known key"),
        ("num_nodes: 2\ndevices_per_node: 8\ndevice: tpu-v3\ntorus: [3, 4]\n", "cluster.torus"),
        ("num_nodes: 2\ndevices_per_node: 8\ndevice: h100\nlinks:\n- {devices: 8, bytes_per_s: 4.0e11, latency_s: 0}\n",
         "cluster.links[0].devices (=8) must be at least the number of devices (=16)"),
    ],
)  # fmt: skip
def test_impossible_clusters_are_refused_in_words(facts: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(facts)
    done = shardyard("plan", EXAMPLE, "--cluster", file)
    assert done.returncode == 2
    assert told in done.stderr


@pytest.mark.slow
def test_this_machine_is_measured_once_by_each_method(tmp_path: Path) -> None:
    place, file = f"--state-dir={tmp_path}", tmp_path / "cache" / "calibration-cpu.json"
    file.parent.mkdir()
    older = Calibration(machine=machine(), flops_per_s={"float32": 1.0}, layer_s=1.0, method=1)
    file.write_text(older.model_dump_json())
    first = shardyard("calibrate", place)
    assert first.returncode == 0, first.stderr
    assert re.search(r"float32 matrix products +[\d,]+ GFLOP/s a core *\n", first.stdout)
    assert re.search(r"within a node +[\d.,]+ GB/s *\n", first.stdout)
    kept = file.read_bytes()
    assert json.loads(kept)["method"] > older.method
    assert json.loads(shardyard("calibrate", place, "--json").stdout) == json.loads(kept)
    assert file.read_bytes() == kept


# With a control plane: last, so that it runs no longer than they do.


def test_what_is_neither_a_file_nor_a_job_is_said_to_be_neither(plane: ControlPlane) -> None:
    done = shardyard("plan", "job-2", url=plane.url)
    assert done.returncode == 2
    assert f"there is no file job-2, and there is no job 'job-2' at {plane.url}" in done.stderr


def test_a_cluster_is_measured_by_its_control_plane(plane: ControlPlane) -> None:
    done = shardyard("calibrate", "--cluster", url=plane.url)
    assert done.returncode == 0, done.stderr
    assert re.search(r"machine +a stand-in *\nfloat32 matrix products +1 GFLOP/s a core *\n", done.stdout)
    assert "omit them with --cluster" in shardyard("calibrate", "--cluster", "--again").stderr
    assert "add --cluster to measure its cluster" in shardyard("calibrate", f"--url={plane.url}").stderr
    (plane.launcher.folder / "no-room").touch()
    refused = shardyard("calibrate", "--cluster", url=plane.url)
    assert refused.returncode == 1
    assert "2 workers were not placed within 120 s" in refused.stderr


def test_a_preset_is_planned_with_an_adapter_and_the_plan_says_what_a_run_needs(tmp_path: Path) -> None:
    """And that it counts with float32, which nobody asked for."""
    file = tmp_path / "tune.yaml"
    file.write_text(
        "model: {preset: olmoe-1b-7b}\nadapter: {rank: 16}\ndata: {corpus: chat, paths: [/data/a.jsonl]}\n"
        "train: {num_steps: 10, batch_tokens: 65536}\nresources: {num_workers: 8}\n"
    )
    on = ("--num-nodes=1", "--devices-per-node=8", "--device=h100")
    done = shardyard("plan", file, *on, url="http://127.0.0.1:1")
    assert done.returncode == 0, done.stderr
    (needed,) = re.findall(r"^missing +(.*?) *$", done.stdout, re.MULTILINE)
    assert needed.startswith("model.from is required with an adapter")
    of_dtype, of_base = re.findall(r"^by default +(.*?) *$", done.stdout, re.MULTILINE)
    assert of_dtype.startswith("float32: train.dtype is left out")
    assert of_base.startswith("float32: adapter.base is left out")
    told = json.loads(shardyard("plan", file, *on, "--json", url="http://127.0.0.1:1").stdout)
    assert told["defaults"] == {"train.dtype": "float32", "adapter.base": "float32"}
    assert len(told["missing"]) == 1

"""`plan` and `calibrate`: what is printed of layouts and of machines, and the exit code."""

import json
import re
from pathlib import Path

import pytest

from moe.calibrate.rates import machine
from moe.plan import Calibration
from tests.service.control_plane import ControlPlane
from tests.service_cli.command import EXAMPLE, NOWHERE, check_refused, json_of, output_of, shardyard

NODES = ("--num-nodes=2", "--devices-per-node=8", "--device=h100")
CPUS = ("--num-nodes=1", "--devices-per-node=2", "--device=cpu")


def test_plans_of_imagined_clusters_need_no_control_plane(tmp_path: Path) -> None:
    plan = output_of("plan", EXAMPLE, "--devices-per-node=2", "--full", url=NOWHERE)
    assert re.search(r"mesh +expert_data \d x expert \d", plan)
    assert re.search(r"expert degree \d: \d of each\s+layer's\s+8\s+experts", plan)
    for part in ("verdict", "parameters, and the", "memory of the fullest", "time of a step", "why", "next best",
                 "tokens/s"):  # fmt: skip
        assert part in plan
    wide = tmp_path / "wide.yaml"
    wide.write_text(
        "name: wide\nmodel: {preset: gshard-128e-12l}\ndata: {corpus: catalogs}\n"
        "train: {num_steps: 10, batch_tokens: 262144}\nresources: {num_workers: 16}\n"
    )
    assert json_of("plan", wide, *NODES)["num_workers"] == 16
    check_refused("must hold the model", "plan", wide, *NODES, "--memory=1GB")
    check_refused("abacus", "plan", EXAMPLE, "--device=abacus")
    check_refused("write it as 80GB", "plan", EXAMPLE, "--device=cpu", "--memory=much")
    for name in ("job-typo.yaml", "job-a.json"):
        check_refused(f"shardyard: {name}: No such file or directory\n", "plan", name, url=NOWHERE)


DEEPSEEK = EXAMPLE.parent / "deepseek-v3-1024-h100.yaml"


@pytest.mark.slow
def test_a_published_model_is_planned_on_a_laptop(tmp_path: Path) -> None:
    result = shardyard("plan", DEEPSEEK, "--full", url=NOWHERE)
    assert result.returncode == 0, result.stderr
    for line in (
        r"(?m)^on +128 nodes of 8 h100",
        r"layers\.\*\.feed_forward\.moe\.\s*experts\.w_in +256 / expert \d+ x 7,168",
        r"layer with experts: experts +58 +654 B", r"the run +\d+ days +441,000 steps, 14.8 T tokens",
    ):  # fmt: skip
        assert re.search(line, result.stdout)
    assert "not yet" not in result.stdout
    assert "could not" not in result.stderr
    request = tmp_path / "peer.yaml"
    request.write_text(f"{DEEPSEEK.read_text()}\nprofile: peer\n")
    peer = output_of("plan", request, "--full", url=NOWHERE)
    assert re.search(r"(?m)^run by +Megatron-Core", peer)
    assert "not yet: the layout of a peer" in peer
    request.write_text(f"{DEEPSEEK.read_text()}\nprofile: theirs\n")
    check_refused("profile (='theirs') must be one of ours, peer, torchtitan", "plan", request, url=NOWHERE)
    small_cluster = tmp_path / "cluster.yaml"
    small_cluster.write_text("num_nodes: 1\ndevices_per_node: 8\ndevice: h100\n")
    too_small = check_refused("GiB too much", "plan", DEEPSEEK, "--cluster", small_cluster, "--num-workers=8")
    assert re.search(r"optimizer, [\d.,]+ GiB; use [\d,]+ workers", too_small)


@pytest.mark.slow
def test_a_grid_and_the_smallest_cluster(tmp_path: Path) -> None:
    grid = output_of("plan", EXAMPLE, *NODES, "--what-if", "experts=8,16,nodes=1,2")
    rows = [line.split()[:2] for line in grid.splitlines()[1:]]
    assert rows == [["8", "1"], ["8", "2"], ["16", "1"], ["16", "2"]]
    check_refused("write it as experts=128,256,nodes=64", "plan", EXAMPLE, *NODES, "--what-if", "colour=8")
    check_refused("nodes=two", "plan", EXAMPLE, *NODES, "--what-if", "nodes=1,two")
    result = shardyard("plan", EXAMPLE, *CPUS, "--what-if", "nodes=0")
    assert (result.returncode, "nodes" in result.stdout, result.stderr) == (2, True, ""), "without a single plan"
    output_of("plan", EXAMPLE, *CPUS, "--what-if", "nodes=0,1")
    large = tmp_path / "large.yaml"
    large.write_text(
        "name: paper\nmodel: {preset: gshard-2048e-36l}\ndata: {corpus: catalogs}\n"
        "train: {num_steps: 10, batch_tokens: 4194304, optimizer: {name: adafactor}}\n"
        "resources: {num_workers: 2048}\n"
    )
    smallest_plan = json_of("plan", large, *NODES, "--fit")
    assert smallest_plan["num_workers"] < 2048
    assert sum(v for k, v in smallest_plan["memory"].items() if k != "limit") <= smallest_plan["memory"]["limit"]


POOLS = """
pools:
- {name: old, num_nodes: 2, devices_per_node: 8, device: a100-80, price_per_hour: 1.5}
- {name: new, num_nodes: 1, devices_per_node: 8, device: h100, price_per_hour: 3.25}
- {name: single, num_nodes: 1, devices_per_node: 1, device: h200, price_per_hour: 3}
"""


@pytest.mark.slow
def test_of_pools_the_cheapest_is_taken(tmp_path: Path) -> None:
    file, cheapest, plan_file = (tmp_path / name for name in ("cluster.yaml", "cheapest.json", "plan.json"))
    file.write_text(POOLS)
    plan = ("plan", EXAMPLE, "--cluster", file)
    output = output_of(*plan, "--goal=cost", "--full", f"--save={cheapest}", url=NOWHERE, COLUMNS="200")
    assert "on               pool old, 2 nodes of 8 a100-80" in output
    assert re.search(r"money +12\.00 +per hour, 0\.0\d+ per million tokens, 0\.0\d+ for the run", output)
    assert re.search(r"pool new: 2 workers would take .* per million tokens\), [\d.]+% more expensive", output)
    assert "pool single cannot hold it: resources (='2 workers') must be at most the number of devices" in output
    fastest = json_of(*plan)
    assert (fastest["pool"], fastest["money"]["per_hour"]) == ("new", 26)
    plan_file.write_text(json.dumps(fastest))
    comparison = output_of("plan", "diff", plan_file, cheapest, COLUMNS="200")
    assert f"pool: new for {plan_file}, old for {cheapest}" in comparison
    assert "price per million tokens: 0." in comparison
    output_of(*plan, "--against", plan_file)
    assert shardyard(*plan, "--goal=cost", "--against", plan_file).returncode == 2
    table = output_of(*plan, "--what-if", "experts=8,16")
    assert [line.split()[:2] for line in table.splitlines()[1:]] == [["8", "new"], ["16", "new"]]
    check_refused("the cluster has pools", *plan, "--what-if", "nodes=2")
    explanation = json_of(*plan, "--explain-against", "expert=1")
    assert (explanation["chosen"]["pool"], explanation["against"]["device_type"]) == ("new", "h100")
    smallest = json_of(*plan, "--fit", "--goal=cost")
    assert (smallest["pool"], smallest["num_workers"]) == ("single", 2)  # all 8 devices of "old" are billed
    file.write_text(POOLS.replace(", price_per_hour: 3}", "}"))
    check_refused("cluster.pools[2].price_per_hour is required for pool single", *plan, "--goal=cost")
    module = ("plan", "--module=a:b", "--sample=a:c", "--cluster", file)
    check_refused("describe one pool as the cluster", *module)


@pytest.mark.slow
def test_prices_and_goals_of_imagined_clusters() -> None:
    for options, money in (
        (("--devices-per-node=2",), "1.00"), (("--devices-per-node=8",), "4.00"),
        (("--devices-per-node=8", "--billing-unit=1"), "1.00"),
    ):  # fmt: skip
        plan = output_of("plan", EXAMPLE, *options, "--price=0.5", "--full")
        assert re.search(rf"money +{re.escape(money)} +per hour, ", plan)
    fixed_plan = json_of("plan", EXAMPLE, "--devices-per-node=2", "--price=0.5", "--goal=time")
    assert fixed_plan["reasons"][1].startswith("goal time had no choice: the job sets it")
    for options, words in (
        (("--devices-per-node=2", "--price=much"), "--price (='much') must be an amount of money above 0"),
        (("--billing-unit=1",), "--billing-unit applies to a hypothetical cluster; add --num-nodes and --device"),
        (("--price=2",), "--price applies to a hypothetical cluster; add --num-nodes and --device"),
        (("--devices-per-node=2", "--goal=fast"), "--goal (='fast') must be time or cost"),
    ):
        check_refused(words, "plan", EXAMPLE, *options)


def test_a_device_may_be_given_by_its_facts() -> None:
    facts = (
        "{name: x100, memory_bytes: 80000000000, bfloat16_flops_per_s: 5.0e+14, memory_bytes_per_s: 2.0e+12, "
        "link_bytes_per_s: 3.0e+11}"
    )
    plan = ("plan", EXAMPLE, "--devices-per-node=2", "--full")
    output = output_of(*plan, f"--device={facts}", url=NOWHERE, COLUMNS="200")
    assert "2 on x100" in output
    assert "kernels of x100 were never measured" in output
    for wrong, path in (
        ("{memory_bytes: 1", "line 1"), ("[1]", "--device"),
        ("{memory_bytes: 1}", "cluster.device.bfloat16_flops_per_s"),
    ):  # fmt: skip
        check_refused(path, *plan, f"--device={wrong}")


@pytest.mark.slow
def test_a_kept_plan_says_what_it_was_made_for(tmp_path: Path) -> None:
    first, second = (output_of("plan", EXAMPLE, *CPUS, "--json") for _ in range(2))
    assert first == second
    plan_file = tmp_path / "plan.json"
    plan_file.write_text(first)
    output_of("plan", EXAMPLE, *CPUS, "--against", plan_file)
    elsewhere = ("--num-nodes=2", "--devices-per-node=2", "--device=cpu")
    check_refused("was made for another cluster", "plan", EXAMPLE, *elsewhere, "--against", plan_file)
    plan_file.write_text(json.dumps({**json.loads(first), "profile": "peer"}))
    check_refused("was made for another profile", "plan", EXAMPLE, *CPUS, "--against", plan_file)
    plan_file.write_text('{"version": 7}')
    assert shardyard("plan", EXAMPLE, *CPUS, "--against", plan_file).returncode == 2


IMPOSSIBLE = {
    "pools:\n- {name: a, num_nodes: 1, devices_per_node: 1}\ndevice: cpu\n": "cluster.device (='cpu') applies to one",
    "num_nodes: 1\ndevices_per_node: 8\ndevice: abacus\n": "cluster.device (='abacus') is not a known device type",
    "num_nodes: 0\ndevices_per_node: 8\n": "cluster.num_nodes (=0) must be greater than 0",
    "num_nodes: 1\ndevices_per_node: 8\ncolour: red\n": "cluster.colour (='red') is not a known key",
    "num_nodes: 2\ndevices_per_node: 8\ndevice: tpu-v3\ntorus: [3, 4]\n": "cluster.torus",
    "num_nodes: 2\ndevices_per_node: 8\ndevice: h100\nlinks:\n- {devices: 8, bytes_per_s: 4.0e11, latency_s: 0}\n":
        "cluster.links[0].devices (=8) must be at least the number of devices (=16)",
}  # fmt: skip


@pytest.mark.slow
def test_impossible_clusters_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    for facts, words in IMPOSSIBLE.items():
        file.write_text(facts)
        check_refused(words, "plan", EXAMPLE, "--cluster", file)


@pytest.mark.slow
def test_this_machine_is_measured_once_by_each_method(tmp_path: Path) -> None:
    place, file = f"--state-dir={tmp_path}", tmp_path / "cache" / "calibration-cpu.json"
    file.parent.mkdir()
    older = Calibration(machine=machine(), flops_per_s={"float32": 1.0}, layer_s=1.0, method=1)
    file.write_text(older.model_dump_json())
    first = output_of("calibrate", place)
    assert re.search(r"float32 matrix products +[\d,]+ GFLOP/s a core *\n", first)
    assert re.search(r"within a node +[\d.,]+ GB/s *\n", first)
    content = file.read_bytes()
    assert json.loads(content)["method"] > older.method
    assert json_of("calibrate", place) == json.loads(content)
    assert file.read_bytes() == content


# Tests with a control plane come last, so that it runs only for them.


def test_a_name_that_is_neither_a_file_nor_a_job(plane: ControlPlane) -> None:
    words = f"there is no file job-2, and there is no job 'job-2' at {plane.url}"
    check_refused(words, "plan", "job-2", url=plane.url)


def test_a_cluster_is_measured_by_its_control_plane(plane: ControlPlane) -> None:
    output = output_of("calibrate", "--cluster", url=plane.url)
    assert re.search(r"machine +a stand-in *\nfloat32 matrix products +1 GFLOP/s a core *\n", output)
    check_refused("omit them with --cluster", "calibrate", "--cluster", "--again")
    check_refused("add --cluster to measure its cluster", "calibrate", f"--url={plane.url}")
    (plane.launcher.folder / "no-room").touch()
    check_refused("2 workers were not placed within 120 s", "calibrate", "--cluster", url=plane.url, code=1)


def test_a_preset_is_planned_with_an_adapter_and_the_plan_says_what_a_run_needs(tmp_path: Path) -> None:
    """It also says that it assumes float32 by default."""
    file = tmp_path / "tune.yaml"
    file.write_text(
        "model: {preset: olmoe-1b-7b}\nadapter: {rank: 16}\ndata: {corpus: chat, paths: [/data/a.jsonl]}\n"
        "train: {num_steps: 10, batch_tokens: 65536}\nresources: {num_workers: 8}\n"
    )
    plan = ("plan", file, "--num-nodes=1", "--devices-per-node=8", "--device=h100")
    output = output_of(*plan, url=NOWHERE)
    (missing,) = re.findall(r"^missing +(.*?) *$", output, re.MULTILINE)
    assert missing.startswith("model.from is required with an adapter")
    of_dtype, of_base = re.findall(r"^by default +(.*?) *$", output, re.MULTILINE)
    assert of_dtype.startswith("float32: train.dtype is not set")
    assert of_base.startswith("float32: adapter.base is not set")
    answer = json_of(*plan, url=NOWHERE)
    assert answer["defaults"] == {"train.dtype": "float32", "adapter.base": "float32"}
    assert len(answer["missing"]) == 1

"""`plan` compared with another layout or a saved plan, drawn as a picture, and of a user's own module."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.service.control_plane import ControlPlane
from tests.service_cli.command import EXAMPLE, NOWHERE, check_refused, json_of, output_of, shardyard

CLUSTER = ("--num-nodes=1", "--devices-per-node=2", "--device=cpu")


def test_a_layout_of_ones_own_is_shown_beside_the_chosen_one() -> None:
    output = output_of("plan", EXAMPLE, *CLUSTER, "--explain-against=expert=1,recompute=full", url=NOWHERE)
    assert output.startswith("chosen\n")
    for part in (r"requested\n", r"expert +2 +1", r"recompute +none +full", r"mesh +expert_data 2 x expert 1",
                 r"chosen +asked +difference", r"\ntotal +[\d.,]+ m?s +[\d.,]+ m?s +[+-][\d.,]+ m?s",
                 r"\ntotal +84 MiB +0\.10 GiB", r"\nfree +[\d.]+ GiB +[\d.]+ GiB",
                 r"the chosen layout is predicted",
                 r"all-to-all: [\d.,]+ m?s more: experts are spread over 2 ranks"):  # fmt: skip
        assert re.search(part, output), part
    assert "allowance" not in output


def test_programs_have_both_plans_and_the_difference_of_each_term(tmp_path: Path) -> None:
    plan_file, replicated_job = tmp_path / "kept.json", tmp_path / "replicated.yaml"
    layout = "expert: 1, micro_batch_groups: 1"
    replicated_job.write_text(EXAMPLE.read_text().replace("parallel: {expert: 2}", f"parallel: {{{layout}}}"))
    output_of("plan", replicated_job, *CLUSTER, f"--save={plan_file}", url=NOWHERE)
    saved_plan = json.loads(plan_file.read_text())
    answer = json_of(
        "plan", EXAMPLE, *CLUSTER, "--explain-against", plan_file, url=NOWHERE
    )  # a saved plan is a layout, too
    assert (answer["against"]["degrees"], answer["against"]["options"]) == (
        saved_plan["degrees"],
        saved_plan["options"],
    )

    against = ("--explain-against", "expert=1,micro_batch_groups=1")
    answer = json_of("plan", EXAMPLE, *CLUSTER, *against, f"--save={plan_file}", url=NOWHERE)
    assert list(answer) == ["chosen", "against", "time", "memory", "why"]
    assert answer["chosen"] == json.loads(plan_file.read_text())
    assert (answer["chosen"]["degrees"]["expert"], answer["against"]["degrees"]["expert"]) == (2, 1)
    for part, field, total in (("time", "predicted", "step_s"), ("memory", "memory", "total")):
        terms = answer[part]
        for kind, term in terms.items():
            assert term["difference"] == pytest.approx(term["against"] - term["chosen"])
            if kind != total:
                assert term["chosen"] == answer["chosen"][field][kind]
        exclusions = (total, "hidden_s", "limit")
        difference = sum(term["difference"] for kind, term in terms.items() if kind not in exclusions)
        assert difference == pytest.approx(terms[total]["difference"])
    assert answer["why"][0].startswith("the chosen layout is predicted")


@pytest.mark.slow
def test_a_layout_that_cannot_be_is_refused(tmp_path: Path) -> None:
    wide = tmp_path / "wide.yaml"
    wide.write_text(
        "name: wide\nmodel: {preset: gshard-512e-36l}\ndata: {corpus: catalogs}\n"
        "train: {num_steps: 10, batch_tokens: 1048576}\nresources: {num_workers: 128}\n"
    )
    plan = ("plan", wide, "--num-nodes=16", "--devices-per-node=8", "--device=h100")
    output_of(*plan, url=NOWHERE)
    layout = "--explain-against=expert=2,fsdp=1,expert_fsdp=1,pipeline=1,tensor=1"
    large = check_refused("--explain-against: resources ", *plan, layout, url=NOWHERE)
    assert re.search(r"[\d.,]+ GiB too much", large)
    for layout, words in {
        "expert=3": "--explain-against: model.moe.num_experts (=8) must be divisible by parallel.expert (=3)",
        "tensor=2,context=2": "must multiply to the number of workers (=2)",
        "tensor=two": "--explain-against: parallel.tensor (='two')",
        "colour=2": "--explain-against: colour (='2') is not a field of parallel; use one of expert, data",
        ",".join(["tensor=1"] * 100): "--explain-against: tensor (='1') is given twice",
        "tensor": "is neither a layout nor an existing file; write it as tensor=2,expert=8",
    }.items():
        check_refused(words, "plan", EXAMPLE, *CLUSTER, f"--explain-against={layout}", url=NOWHERE)


def test_a_kept_plan_is_what_json_prints_and_what_against_reads(tmp_path: Path) -> None:
    plan_file = tmp_path / "kept.json"
    plan_file.write_text("of before")
    assert "fits" in output_of("plan", EXAMPLE, *CLUSTER, f"--save={plan_file}", url=NOWHERE)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.json"]
    assert plan_file.read_text() == output_of("plan", EXAMPLE, *CLUSTER, "--json", url=NOWHERE)
    assert list(json.loads(plan_file.read_text())) == sorted(json.loads(plan_file.read_text()))
    output_of("plan", EXAMPLE, *CLUSTER, f"--against={plan_file}", url=NOWHERE)
    nowhere = tmp_path / "none" / "kept.json"
    words = f"shardyard: {nowhere}: No such file or directory\n"
    assert shardyard("plan", EXAMPLE, *CLUSTER, f"--save={nowhere}", url=NOWHERE).stderr == words
    link = tmp_path / "link.json"
    link.symlink_to(plan_file)
    for place in (link, "/dev/null"):
        output_of("plan", EXAMPLE, *CLUSTER, f"--save={place}", url=NOWHERE)
        assert Path(place).exists()
    assert (link.is_symlink(), plan_file.is_symlink()) == (True, False)


def test_two_kept_plans_are_compared(tmp_path: Path) -> None:
    two, four = tmp_path / "two.json", tmp_path / "four.json"
    output_of("plan", EXAMPLE, *CLUSTER, f"--save={two}", url=NOWHERE)
    output_of("plan", EXAMPLE, "--devices-per-node=4", "--num-workers=4", f"--save={four}", url=NOWHERE)
    output = output_of("plan", "diff", two, four, url=NOWHERE)
    for part in (rf"plan +{re.escape(str(two))}", rf"plan +{re.escape(str(four))}", "made for\n- a different cluster",
                 "differences in layout", "time of a step", "memory of the fullest",
                 re.escape(f"workers: 2 for {two}, 4 for {four}")):  # fmt: skip
        assert re.search(part, output), part
    answer = json_of("plan", "diff", two, four, url=NOWHERE)
    assert (answer["first"], answer["second"]) == (json.loads(two.read_text()), json.loads(four.read_text()))
    assert answer["priced_for"] == {"num_workers": {"first": 2, "second": 4}}
    assert list(answer["made_for"]) == ["cluster"]
    reverse = json_of("plan", "diff", four, two, url=NOWHERE)
    assert reverse["time"]["step_s"]["difference"] == -answer["time"]["step_s"]["difference"]
    assert "made for\n- the same" in output_of("plan", "diff", two, two, url=NOWHERE)
    four.write_text("{}")
    for path in (four, tmp_path / "none.json"):
        assert shardyard("plan", "diff", two, path, url=NOWHERE).returncode == 2


@pytest.mark.slow
def test_the_best_layouts_are_drawn(tmp_path: Path) -> None:
    picture, second_picture = tmp_path / "plan.svg", tmp_path / "again.svg"
    result = shardyard("plan", EXAMPLE, *CLUSTER, f"--draw={picture}", url=NOWHERE)
    assert (result.returncode, "layouts (predicted)" in result.stdout) == (0, True), result.stderr
    words = [element.text for element in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert "2 x cpu: the 5 best layouts" in words
    assert {"memory of the fullest device", "matrix products", "parameters"} <= set(words)
    shardyard("plan", EXAMPLE, *CLUSTER, f"--draw={second_picture}", "--json", url=NOWHERE)
    assert second_picture.read_bytes() == picture.read_bytes()


OF_A_JOB = "job-1 already has a plan: a job's id accepts only --full, --save, --draw, --url and --json"
WITHOUT_MODULE = "--sample and --hints require --module"
MODULE_OPTIONS = "--module accepts only --sample, cluster options, --hints, --save, --draw and --json"
MISUSES: list[tuple[tuple[str | Path, ...], str]] = [
    ((EXAMPLE, "--sensitivity"), "--sensitivity needs a cluster; add --cluster"),
    ((EXAMPLE, "--fit"), "--fit needs a cluster"),
    ((EXAMPLE, "--what-if=experts=8"), "--what-if needs a cluster"),
    ((EXAMPLE, "--explain-against=nonsense"), "is neither a layout nor an existing file"),
    ((EXAMPLE, "--explain-against=colour=2"), "is not a field of parallel"),
    ((EXAMPLE, "--against=missing.json"), "missing.json: No such file or directory"),
    ((EXAMPLE, "--what-if=experts=8", "--fit"), "--what-if prints a table of plans; omit --fit"),
    ((EXAMPLE, *CLUSTER, "--what-if=nodes=1,2", "--save=a"), "--what-if prints a table of plans"),
    ((EXAMPLE, *CLUSTER, "--what-if=nodes=1,2", "--explain-against=tensor=2"), "--what-if prints a table of plans"),
    ((EXAMPLE, "--fit", "--num-workers=2"), "--fit chooses the number of workers"),
    ((EXAMPLE, f"--num-workers={10**20 - 1}"), "'--num-workers': must be less than or equal to 1000000"),
    ((EXAMPLE, "--save=plan.svg", "--draw=plan.svg"), "--save plan.svg and --draw each write a file"),
    ((EXAMPLE, *CLUSTER, "--draw=plan.png"), "--draw plan.png writes an SVG picture; use a name that ends in .svg"),
    ((EXAMPLE, "--devices-per-node=2", "--device="), "--device (='') must be a known device type"),
    ((EXAMPLE, "--devices-per-node=2", "--memory="), "--memory (='') must be an amount of memory"),
    ((EXAMPLE, "--devices-per-node=2", "--memory=0.0000001B"), "must be an amount of memory; write it as 80GB"),
    ((EXAMPLE, "--devices-per-node=2", "--memory=٣GB"), "must be an amount of memory"),
    ((EXAMPLE, "--devices-per-node=2", f"--memory={400 * '9'}GB"), "memory_bytes"),
    (("diff",), "write plan diff PLAN PLAN (or ./diff for a job file of that name)"),
    (("diff", "a"), "diff compares two saved plans"),
    (("diff", "a", "b", "c"), "diff compares two saved plans"),
    (("diff", "a", "b", "--top=2"), "diff accepts only --json"),
    (("diff", "a", "b", "--save=c"), "diff accepts only --json"),
    (("diff", "a", "b", "--fit"), "diff accepts only --json"),
    (("a", "b"), "give one FILE or one job, not 2"),
    (("./diff", "a"), "give one FILE or one job, not 2"),
    (("./diff",), "diff: No such file or directory"),
    (("job-1", "--top=2"), OF_A_JOB),
    (("job-1", "--explain-against=tensor=2"), OF_A_JOB),
    ((EXAMPLE, *CLUSTER, "--hints=a"), WITHOUT_MODULE),
    (("--sample=a:b",), WITHOUT_MODULE),
    ((), "give FILE, a job's id, diff and two plans, or --module"),
    (("--module=a:b", "--devices-per-node=2"), "--module requires --sample, the function that returns one batch"),
    (("--module=a:b", "--sample=a:c"), "--module needs a cluster"),
    (("job.yaml", "--module=a:b"), MODULE_OPTIONS),
    (("--module=a:b", "--sample=a:c", "--explain-against=tensor=2"), MODULE_OPTIONS),
    (("--module=a.b", "--sample=a:c", "--devices-per-node=2"), "--module (='a.b') must be module:function"),
    (("--module=a:b", "--sample=a:b.c", "--devices-per-node=2"), "--sample (='a:b.c') must be module:function"),
]


@pytest.mark.slow
def test_options_that_cannot_be_are_refused_before_any_control_plane_is_asked() -> None:
    for arguments, words in MISUSES:
        check_refused(words, "plan", *arguments, url=NOWHERE)


@pytest.mark.slow
def test_a_modules_plan_is_none_to_compare(tmp_path: Path) -> None:
    of_module, of_job = tmp_path / "module.json", tmp_path / "job.json"
    code = "tests.service.users_module"
    module = (f"--module={code}:build", f"--sample={code}:sample", "--devices-per-node=2")
    output_of("plan", *module, f"--save={of_module}")
    output_of("plan", EXAMPLE, *CLUSTER, f"--save={of_job}", url=NOWHERE)
    check_refused("module.json is the plan of a module; name the plan of a job", "plan", "diff", of_job, of_module)


# Tests with a control plane come last, so that it runs only for them.


def test_a_control_plane_plans_both(plane: ControlPlane, job_file: Path, tmp_path: Path) -> None:
    plan_file = tmp_path / "kept.json"
    answer = json_of("plan", job_file, "--explain-against=expert=1", f"--save={plan_file}", url=plane.url)
    assert answer["against"]["degrees"]["expert"] == 1
    assert answer["chosen"]["num_workers"] == answer["against"]["num_workers"]
    output = output_of("plan", job_file, "--explain-against", plan_file, url=plane.url)
    assert f"the cluster of {plane.url}" in output
    words = "must be divisible by parallel.expert (=3)"
    check_refused(words, "plan", job_file, "--explain-against=expert=3", url=plane.url)


def test_a_jobs_plan_is_kept_and_drawn(plane: ControlPlane, job_file: Path, tmp_path: Path) -> None:
    plan_file, picture = tmp_path / "kept.json", tmp_path / "plan.svg"
    job_id = output_of("submit", job_file, url=plane.url).strip()
    output = output_of("plan", job_id, f"--save={plan_file}", f"--draw={picture}", "--json", url=plane.url)
    assert output == plan_file.read_text()
    assert "<svg" in picture.read_text()


@pytest.mark.slow
def test_a_plan_says_what_it_depends_on_and_what_it_is_priced_by(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        "model: {preset: olmoe-1b-7b}\ndata: {corpus: synthetic, max_tokens: 4096}\n"
        "train: {num_steps: 10, batch_tokens: 131072, dtype: bfloat16}\nresources: {num_workers: 8}\n"
    )
    plan = ("plan", file, "--num-nodes=1", "--devices-per-node=8", "--device=h100")
    answer = json_of(*plan, "--software=megatron-graphs", "--sensitivity")
    assert answer["plan"]["software"] == "megatron-graphs"
    changes = {change["what"]: change for change in answer["sensitivity"]}
    assert {"links within nodes 20% slower", "kernels 20% slower", "memory 10% less"} < changes.keys()
    step_s = sum(seconds for kind, seconds in answer["plan"]["predicted"].items() if kind != "hidden_s")
    for name, change in changes.items():
        if "slower" in name:
            assert change["step_s"] >= step_s * 0.9999
            assert change["best"] is not None
    output = output_of(*plan, "--sensitivity")
    assert "assumptions" in output
    assert "priced by        ours-eager" in output
    check_refused("--software (='theirs') must be one of ours-eager", *plan, "--software=theirs")
    check_refused("give one at a time", *plan, "--sensitivity", "--explain-against=tensor=2")


CODE = "tests.service.users_module"
MODULE = f"--module={CODE}:build", f"--sample={CODE}:sample"


@pytest.mark.slow
def test_a_module_is_planned_explained_and_kept(tmp_path: Path) -> None:
    cluster, hints, plan_file = tmp_path / "cluster.yaml", tmp_path / "hints.yaml", tmp_path / "plan.json"
    cluster.write_text("{num_nodes: 1, devices_per_node: 2}")
    hints.write_text('"items.weight": {split: 0}')
    plan = ("plan", *MODULE, f"--cluster={cluster}", f"--hints={hints}")
    assert "items.weight" in output_of(*plan, f"--save={plan_file}")
    content = json.loads(plan_file.read_text())
    assert (content["mesh"], content["parameters"]["items.weight"]) == ([["devices", 2]], "S(0)")
    assert output_of(*plan, "--json") == plan_file.read_text()
    assert json_of("plan", *MODULE, "--devices-per-node=3")["mesh"] == [["devices", 3]]


@pytest.mark.slow
def test_faults_of_a_module_and_of_hints_are_told_by_their_place(tmp_path: Path) -> None:
    cluster, sample, hints = "--devices-per-node=2", f"--sample={CODE}:sample", tmp_path / "hints.yaml"
    raises = check_refused("raise KeyError", "plan", f"--module={CODE}:raises", sample, cluster)  # the user's traceback
    assert f"--module (='{CODE}:raises') cannot be planned: KeyError: 'no such layer' (users_module.py:" in raises
    prints = shardyard("plan", f"--module={CODE}:prints", sample, cluster, "--json")
    assert json.loads(prints.stdout)["mesh"] == [["devices", 2]]
    assert "not this" in prints.stderr
    for text, words in (('"itms.weight": {split: 0}', "items.weight"), ("- items.weight", "must map names to hints")):
        hints.write_text(text)
        check_refused(words, "plan", *MODULE, cluster, f"--hints={hints}")

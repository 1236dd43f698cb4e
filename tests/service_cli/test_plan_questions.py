"""`plan` asked why: against another layout, against a kept plan, and as a picture."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.service.control_plane import ControlPlane
from tests.service_cli.command import shardyard

EXAMPLE = Path(__file__).parents[2] / "examples" / "translate-100-to-english.yaml"
ON = ("--num-nodes=1", "--devices-per-node=2", "--device=cpu")
NOWHERE = "http://127.0.0.1:1"


def test_a_layout_of_ones_own_is_shown_beside_the_chosen_one() -> None:
    done = shardyard("plan", EXAMPLE, *ON, "--explain-against=expert=1,recompute=full", url=NOWHERE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("chosen\n")
    for part in (r"requested\n", r"expert +2 +1", r"recompute +none +full", r"mesh +expert_data 2 x expert 1",
                 r"chosen +asked +difference", r"\ntotal +[\d.,]+ m?s +[\d.,]+ m?s +[+-][\d.,]+ m?s",
                 r"\ntotal +88 MiB +0\.11 GiB", r"\nfree +[\d.]+ GiB +[\d.]+ GiB",
                 r"the chosen layout is predicted",
                 r"all-to-all: [\d.,]+ m?s more: experts are spread over 2 ranks"):  # fmt: skip
        assert re.search(part, done.stdout), part
    assert "allowance" not in done.stdout


def test_programs_have_both_plans_and_the_difference_of_each_term(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    asked = ("--explain-against", "expert=1,micro_batch_groups=1")
    done = shardyard("plan", EXAMPLE, *ON, *asked, "--json", f"--save={kept}", url=NOWHERE)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert list(told) == ["chosen", "against", "time", "memory", "why"]
    assert told["chosen"] == json.loads(kept.read_text())
    assert (told["chosen"]["degrees"]["expert"], told["against"]["degrees"]["expert"]) == (2, 1)
    for part, predicted, total in (("time", "predicted", "step_s"), ("memory", "memory", "total")):
        terms = told[part]
        for kind, term in terms.items():
            assert term["difference"] == pytest.approx(term["against"] - term["chosen"])
            if kind != total:
                assert term["chosen"] == told["chosen"][predicted][kind]
        beside = (total, "hidden_s", "limit")
        added = sum(term["difference"] for kind, term in terms.items() if kind not in beside)
        assert added == pytest.approx(terms[total]["difference"])
    assert told["why"][0].startswith("the chosen layout is predicted")


def test_a_kept_plan_is_a_layout_to_ask_for(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    replicated = tmp_path / "replicated.yaml"
    replicated.write_text(
        EXAMPLE.read_text().replace("parallel: {expert: 2}", "parallel: {expert: 1, micro_batch_groups: 1}")
    )
    assert shardyard("plan", replicated, *ON, f"--save={kept}", url=NOWHERE).returncode == 0
    done = shardyard("plan", EXAMPLE, *ON, "--explain-against", kept, "--json", url=NOWHERE)
    assert done.returncode == 0, done.stderr
    told, asked = json.loads(done.stdout), json.loads(kept.read_text())
    assert told["chosen"]["degrees"] != asked["degrees"]
    assert (told["against"]["degrees"], told["against"]["options"]) == (asked["degrees"], asked["options"])


def test_a_layout_that_cannot_be_is_refused_with_what_lacks(tmp_path: Path) -> None:
    wide = tmp_path / "wide.yaml"
    wide.write_text(
        "name: wide\nmodel: {preset: gshard-512e-36l}\ndata: {corpus: catalogs}\n"
        "train: {num_steps: 10, batch_tokens: 1048576}\nresources: {num_workers: 128}\n"
    )
    on = ("--num-nodes=16", "--devices-per-node=8", "--device=h100")
    assert shardyard("plan", wide, *on, url=NOWHERE).returncode == 0
    large = shardyard("plan", wide, *on, "--explain-against=expert=2,fsdp=1,expert_fsdp=1,pipeline=1,tensor=1",
                      url=NOWHERE)  # fmt: skip
    assert large.returncode == 2
    assert re.search(r"--explain-against: resources .* [\d.,]+ GiB too much", large.stderr)
    for layout, told in {
        "expert=3": "--explain-against: model.moe.num_experts (=8) must be divisible by parallel.expert (=3)",
        "tensor=2,context=2": "must multiply to the number of workers (=2)",
        "tensor=two": "--explain-against: parallel.tensor (='two')",
        "colour=2": "--explain-against: colour (='2') is not a field of parallel; use one of expert, data",
        ",".join(["tensor=1"] * 100): "--explain-against: tensor (='1') is given twice",
        "tensor": "is neither a layout nor an existing file; write it as tensor=2,expert=8",
    }.items():
        refused = shardyard("plan", EXAMPLE, *ON, f"--explain-against={layout}", url=NOWHERE)
        assert (refused.returncode, told in refused.stderr) == (2, True), refused.stderr
        assert refused.stdout == ""


def test_a_kept_plan_is_what_json_prints_and_what_against_reads(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text("of before")
    done = shardyard("plan", EXAMPLE, *ON, f"--save={kept}", url=NOWHERE)
    assert (done.returncode, "fits" in done.stdout) == (0, True), done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["kept.json"]
    assert kept.read_text() == shardyard("plan", EXAMPLE, *ON, "--json", url=NOWHERE).stdout
    assert list(json.loads(kept.read_text())) == sorted(json.loads(kept.read_text()))
    assert shardyard("plan", EXAMPLE, *ON, f"--against={kept}", url=NOWHERE).returncode == 0
    other = shardyard("plan", EXAMPLE, "--devices-per-node=3", f"--against={kept}", url=NOWHERE)
    assert (other.returncode, "was made for another cluster" in other.stderr) == (2, True)
    nowhere = shardyard("plan", EXAMPLE, *ON, f"--save={tmp_path / 'none' / 'kept.json'}", url=NOWHERE)
    assert nowhere.returncode == 2
    assert nowhere.stderr == f"shardyard: {tmp_path / 'none' / 'kept.json'}: No such file or directory\n"
    link = tmp_path / "link.json"
    link.symlink_to(kept)
    for place in (link, "/dev/null"):
        assert shardyard("plan", EXAMPLE, *ON, f"--save={place}", url=NOWHERE).returncode == 0
        assert Path(place).exists()
    assert (link.is_symlink(), kept.is_symlink()) == (True, False)


def test_two_kept_plans_are_compared(tmp_path: Path) -> None:
    two, four = tmp_path / "two.json", tmp_path / "four.json"
    shardyard("plan", EXAMPLE, *ON, f"--save={two}", url=NOWHERE)
    four.write_text(shardyard("plan", EXAMPLE, "--devices-per-node=4", "--num-workers=4", "--json", url=NOWHERE).stdout)
    done = shardyard("plan", "diff", two, four, url=NOWHERE)
    assert done.returncode == 0, done.stderr
    for part in (rf"plan +{re.escape(str(two))}", rf"plan +{re.escape(str(four))}", "made for\n- another cluster",
                 "differences in layout", "time of a step", "memory of the fullest",
                 re.escape(f"workers: 2 of {two}, 4 of {four}")):  # fmt: skip
        assert re.search(part, done.stdout), part
    told = json.loads(shardyard("plan", "diff", two, four, "--json", url=NOWHERE).stdout)
    assert (told["first"], told["second"]) == (json.loads(two.read_text()), json.loads(four.read_text()))
    assert told["priced_for"] == {"num_workers": {"first": 2, "second": 4}}
    assert list(told["made_for"]) == ["cluster"]
    back = json.loads(shardyard("plan", "diff", four, two, "--json", url=NOWHERE).stdout)
    assert back["time"]["step_s"]["difference"] == -told["time"]["step_s"]["difference"]
    same = shardyard("plan", "diff", two, two, url=NOWHERE)
    assert "made for\n- the same" in same.stdout
    four.write_text("{}")
    assert shardyard("plan", "diff", two, four, url=NOWHERE).returncode == 2
    assert shardyard("plan", "diff", two, tmp_path / "none.json", url=NOWHERE).returncode == 2


def test_the_best_layouts_are_drawn(tmp_path: Path) -> None:
    picture, again = tmp_path / "plan.svg", tmp_path / "again.svg"
    done = shardyard("plan", EXAMPLE, *ON, f"--draw={picture}", url=NOWHERE)
    assert (done.returncode, "layouts (predicted)" in done.stdout) == (0, True), done.stderr
    words = [each.text for each in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert "2 x cpu: the 5 best layouts" in words
    assert {"memory of the fullest device", "matrix products", "parameters"} <= set(words)
    shardyard("plan", EXAMPLE, *ON, f"--draw={again}", "--json", url=NOWHERE)
    assert again.read_bytes() == picture.read_bytes()


def test_what_does_not_go_together_is_told() -> None:
    for arguments, told in {
        ("diff",): "diff compares two saved plans; write plan diff PLAN PLAN (or ./diff for a job file of that name)",
        ("diff", "a"): "diff compares two saved plans",
        ("diff", "a", "b", "c"): "diff compares two saved plans",
        ("diff", "a", "b", "--top=2"): "diff accepts only --json",
        ("diff", "a", "b", "--save=c"): "diff accepts only --json",
        ("diff", "a", "b", "--fit"): "diff accepts only --json",
        ("a", "b"): "give one FILE or one job, not 2",
        ("./diff", "a"): "give one FILE or one job, not 2",
        ("./diff",): "diff: No such file or directory",
        (
            "job-1",
            "--top=2",
        ): "job-1 already has a plan: a job's id accepts only --full, --save, --draw, --url and --json",
        ("job-1", "--explain-against=tensor=2"): "job-1 already has a plan",
        (EXAMPLE, *ON, "--what-if=nodes=1,2", "--save=a"): "--what-if prints a table of plans",
        (EXAMPLE, *ON, "--what-if=nodes=1,2", "--explain-against=tensor=2"): "--what-if prints a table of plans",
        (EXAMPLE, *ON, "--draw=plan.png"): "--draw plan.png writes an SVG picture; use a name that ends in .svg",
        (EXAMPLE, *ON, "--hints=a"): "--sample and --hints require --module",
        (
            "--module=a:b",
            "--sample=a:c",
            "--explain-against=tensor=2",
        ): "--module accepts only --sample, cluster options",
    }.items():
        done = shardyard("plan", *arguments, url=NOWHERE)
        assert (done.returncode, told in done.stderr, done.stdout) == (2, True, ""), done.stderr


def test_a_job_file_may_be_named_diff(tmp_path: Path) -> None:
    (tmp_path / "diff").write_bytes(EXAMPLE.read_bytes())
    done = shardyard("plan", f"{tmp_path}/./diff", *ON, url=NOWHERE)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sensitivity"], "--sensitivity needs a cluster; add --cluster"),
        (["--fit"], "--fit needs a cluster"),
        (["--what-if=experts=8"], "--what-if needs a cluster"),
        (["--explain-against=nonsense"], "is neither a layout nor an existing file"),
        (["--explain-against=colour=2"], "is not a field of parallel"),
        (["--against=missing.json"], "missing.json: No such file or directory"),
        (["--what-if=experts=8", "--fit"], "--what-if prints a table of plans; omit --fit"),
        (["--fit", "--num-workers=2"], "--fit chooses the number of workers"),
        (["--num-workers=99999999999999999999"], "'--num-workers': must be less than or equal to 1000000"),
        (["--save=plan.svg", "--draw=plan.svg"], "--save plan.svg and --draw each write a file"),
        (["--devices-per-node=2", "--device="], "--device (='') must be a known device type"),
        (["--devices-per-node=2", "--memory="], "--memory (='') must be an amount of memory"),
        (["--devices-per-node=2", "--memory=0.0000001B"], "must be an amount of memory; write it as 80GB"),
        (["--devices-per-node=2", "--memory=٣GB"], "must be an amount of memory"),
        (["--devices-per-node=2", f"--memory={400 * '9'}GB"], "memory_bytes"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_question_is_told_before_anybody_is_asked(options: list[str], words: str) -> None:
    done = shardyard("plan", EXAMPLE, *options, url=NOWHERE)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr


@pytest.mark.slow
def test_a_modules_plan_is_none_to_compare(tmp_path: Path) -> None:
    of_module, of_job = tmp_path / "module.json", tmp_path / "job.json"
    code = "tests.service.users_module"
    kept = shardyard(
        "plan", f"--module={code}:build", f"--sample={code}:sample", "--devices-per-node=2", f"--save={of_module}"
    )
    assert kept.returncode == 0, kept.stderr
    assert shardyard("plan", EXAMPLE, *ON, f"--save={of_job}", url=NOWHERE).returncode == 0
    done = shardyard("plan", "diff", of_job, of_module)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "shardyard: module.json is the plan of a module; name the plan of a job, written by --save\n"
    )


# With a control plane: last, so that it runs no longer than they do.


def test_a_control_plane_plans_both(plane: ControlPlane, job_file: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    done = shardyard("plan", job_file, "--explain-against=expert=1", "--json", f"--save={kept}", url=plane.url)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["against"]["degrees"]["expert"] == 1
    assert told["chosen"]["num_workers"] == told["against"]["num_workers"]
    shown = shardyard("plan", job_file, "--explain-against", kept, url=plane.url)
    assert (shown.returncode, f"the cluster of {plane.url}" in shown.stdout) == (0, True), shown.stderr
    refused = shardyard("plan", job_file, "--explain-against=expert=3", url=plane.url)
    assert (refused.returncode, "must be divisible by parallel.expert (=3)" in refused.stderr) == (2, True)


def test_a_jobs_plan_is_kept_and_drawn(plane: ControlPlane, job_file: Path, tmp_path: Path) -> None:
    kept, picture = tmp_path / "kept.json", tmp_path / "plan.svg"
    job_id = shardyard("submit", job_file, url=plane.url).stdout.strip()
    done = shardyard("plan", job_id, f"--save={kept}", f"--draw={picture}", "--json", url=plane.url)
    assert done.returncode == 0, done.stderr
    assert done.stdout == kept.read_text()
    assert "<svg" in picture.read_text()


def test_a_plan_says_what_it_depends_on_and_what_it_is_priced_by(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        "model: {preset: olmoe-1b-7b}\ndata: {corpus: synthetic, max_tokens: 4096}\n"
        "train: {num_steps: 10, batch_tokens: 131072, dtype: bfloat16}\nresources: {num_workers: 8}\n"
    )
    on = ("--num-nodes=1", "--devices-per-node=8", "--device=h100")
    told = shardyard("plan", file, *on, "--software=megatron-graphs", "--sensitivity", "--json")
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    assert found["plan"]["software"] == "megatron-graphs"
    changes = {each["what"]: each for each in found["sensitivity"]}
    assert {"links within nodes 20% slower", "kernels 20% slower", "memory 10% less"} < changes.keys()
    step_s = sum(each for kind, each in found["plan"]["predicted"].items() if kind != "hidden_s")
    for what, each in changes.items():
        if "slower" in what:
            assert each["step_s"] >= step_s * 0.9999
            assert each["best"] is not None
    shown = shardyard("plan", file, *on, "--sensitivity")
    assert "assumptions" in shown.stdout
    assert "priced by        ours-eager" in shown.stdout
    wrong = shardyard("plan", file, *on, "--software=theirs")
    assert (wrong.returncode, "--software (='theirs') must be one of ours-eager" in wrong.stderr) == (2, True)
    both = shardyard("plan", file, *on, "--sensitivity", "--explain-against=tensor=2")
    assert (both.returncode, "give one at a time" in both.stderr) == (2, True)

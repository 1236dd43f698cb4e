"""Problem codes: documented, and part of what programs read."""

import json
import pickle
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from moe.spec import PROBLEM_CODES, Problem
from moe.spec.errors import RuleError
from moe.spec.problems import code_of
from tests.refusals import check

PAGE = Path(__file__).parents[2] / "docs" / "problems.md"
PYTHON = [sys.executable, "-m", "service.cli.main"]


def test_every_code_is_documented() -> None:
    assert tuple(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)) == PROBLEM_CODES


def test_problems_hold_any_value_and_broken_rules_pickle() -> None:
    lock = threading.Lock()
    fields = Problem("wrong_type", "hints[0]", lock, "is no hint", "use Split").to_dict()
    assert fields == {"code": "wrong_type", "path": "hints[0]", "value": lock, "rule": "is no hint",
                      "remedy": "use Split"}  # fmt: skip
    copy = pickle.loads(pickle.dumps(RuleError("missing", "is required", "add it")))
    assert (copy.code, copy.rule, copy.remedy) == ("missing", "is required", "add it")
    assert str(copy) == "is required; add it"


def test_types_of_pydantic_have_codes() -> None:
    kinds = {
        "int_type": "wrong_type", "int_parsing": "wrong_type", "int_parsing_size": "out_of_range",
        "greater_than": "out_of_range", "literal_error": "not_a_choice", "datetime_parsing": "invalid_value",
        "url_parsing": "invalid_value", "string_too_short": "empty", "new": "invalid_value",
    }  # fmt: skip
    assert {kind: code_of(kind) for kind in kinds} == kinds


JOB = "model: {preset: gshard-tiny}, data: {corpus: catalogs}"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("spec", "command", "problems"),
    [
        (f"{{foo: 1, {JOB}}}", "plan {spec} --json", [("unknown_key", "foo", 1), ("missing", "train", None)]),
        (f"{{{JOB}, train: {{num_steps: .nan}}}}", "plan {spec} --json", [("wrong_type", "train.num_steps", "nan")]),
        ("", "generate job-x text --json --temperature=-1", [("out_of_range", "--temperature", -1.0)]),
        (f"{{{JOB}, train: {{num_steps: 5, batch_tokens: 1024}}}}", "plan {spec} --json --goal=luck",
         [("not_a_choice", "--goal", "luck")]),
        (f"{{{JOB}, train: {{num_steps: 5, batch_tokens: 1024}}}}", "plan {spec} --json --software=none",
         [("not_a_choice", "--software", "none")]),
    ],
    ids=["spec", "no JSON number", "number", "goal", "software"],
)  # fmt: skip
def test_the_command_line_prints_problems_as_json(tmp_path: Path, spec: str, command: str, problems: list) -> None:
    """`errors` in the one line on standard output; options have problems as fields do."""
    (tmp_path / "job.yaml").write_text(spec)
    answer = run_cli(*command.format(spec=tmp_path / "job.yaml").split())
    assert answer.returncode == 2
    (line,) = answer.stdout.splitlines()
    errors = json.loads(line, parse_constant=pytest.fail)["errors"]
    check(errors, problems)
    assert all(error["rule"] in answer.stderr for error in errors)


def run_cli(*arguments: str | bytes) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PYTHON, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_arguments_are_utf8_and_words_behind_two_dashes_no_options(tmp_path: Path) -> None:
    answer = run_cli("translate", str(tmp_path / "none"), "--", "--json")
    assert (answer.returncode, answer.stdout) == (2, "")
    answer = run_cli("show", b"job-\xff", "--url", "http://127.0.0.1:9")
    message = "shardyard: 'job-\\udcff' is not UTF-8 text; encode it as UTF-8\n"
    assert (answer.returncode, answer.stderr) == (2, message)

"""`plan --module`: plans a user's module in a child process."""

import json
from pathlib import Path

import typer

from moe.plan import Cluster
from moe.spec import Problem, SpecError
from moe.spec.files import read_plain
from moe.spec.module import CODE_REMEDY, is_code
from service.cli.job_plan import PlanOutput
from service.cli.whole_file import write_whole
from service.planner.planning_process import PlanningLimits, ask
from service.planner.request import ModuleRequest


def plan_module(build: str, sample: str, cluster: Cluster, hints: Path | None, output: PlanOutput) -> None:
    """Plan the module, write the requested files, print the plan. Raises SpecError, OSError."""
    for path, code in (("--module", build), ("--sample", sample)):
        if not is_code(code):
            raise SpecError(Problem("invalid_value", path, code, "must be module:function", CODE_REMEDY))
    request = ModuleRequest(
        build=build, sample=sample, cluster=cluster, hints=_hints(hints), picture=output.draw is not None
    )  # fmt: skip
    answer = ask(request, PlanningLimits(), shows_output=True)
    text = json.dumps(answer.plan, indent=1, sort_keys=True)
    if output.save is not None:
        write_whole(output.save, text + "\n")
    if output.draw is not None:
        write_whole(output.draw, answer.picture)
    typer.echo(text if output.as_json else answer.explained)


def _hints(path: Path | None) -> dict[str, object]:
    hints = {} if path is None else read_plain(path)
    if not isinstance(hints, dict) or not all(isinstance(name, str) for name in hints):
        raise SpecError(
            Problem("wrong_type", "--hints", str(path), "must map names to hints",
                    'write it as "*.experts.*": {split: 0}')
        )  # fmt: skip
    return hints

"""The examples are jobs, and the JSON Schema next to them describes a job."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from moe.interchange.expand import expand_request
from moe.plan import plan_request
from moe.spec import JobSpec, json_schema
from moe.spec.sweep import SweepRequest
from tests.unit.test_spec import WRONG, job

FOLDER = {"model_type": "qwen3_moe", "num_experts": 8, "head_dim": 128}
DENSE = {"model_type": "llama"}
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


@pytest.mark.sample(4)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_valid_and_survive_a_round_trip(path: Path, tmp_path: Path) -> None:
    request = yaml.safe_load(path.read_text())  # a job, or a job with facts of a cluster
    if "from" in request.get("model", {}):
        request["model"]["from"] = str(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(DENSE if "upcycle" in request["model"] else FOLDER))
    if "sweep" in request:
        members = SweepRequest.parse(request, "sweep-aaaaaaaaaaaa").members
        assert len({member.spec.name for member in members}) == len(members)
        jsonschema.validate(request, json_schema(with_sweep=True))
        return
    spec = plan_request(expand_request(request, None)).spec
    assert JobSpec.parse(spec.model_dump(mode="json")) == spec
    assert JobSpec.parse(json.loads(spec.model_dump_json())) == spec
    jsonschema.validate(request.get("spec", request), json_schema())


def test_a_job_has_no_sweep_in_its_schema() -> None:
    sweep = {"method": "grid", "fields": {"train.seed": {"values": [1, 2]}}}
    assert not jsonschema.Draft202012Validator(json_schema()).is_valid(job(sweep=sweep))
    assert jsonschema.Draft202012Validator(json_schema(with_sweep=True)).is_valid(job(sweep=sweep))


def test_the_schema_refuses_what_the_spec_refuses() -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    assert validator.is_valid(job(parallel="auto"))
    for case in ("unknown key", "unknown key below", "no steps", "no model", "no such corpus", "another corpus's key"):
        assert not validator.is_valid(WRONG[case][0]), case


def test_the_schema_beside_the_examples_is_the_specs() -> None:
    schema = json.loads((EXAMPLES[0].parent / "job.schema.json").read_text())
    assert schema == json_schema(), "write it anew: shardyard schema > examples/job.schema.json"

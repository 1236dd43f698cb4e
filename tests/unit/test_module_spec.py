"""A user's own module in a job: what is accepted, and how everything else is refused."""

from typing import Any

import pytest
from pydantic import ValidationError

from moe.plan import Cluster, plan_job
from moe.spec import JobSpec, ProblemCode
from moe.tasks.module.code import check_allowed, functions_of, import_function
from service.settings import Settings
from tests.refusals import expect_problem, expect_problems


def job_body(**changes: Any) -> dict[str, Any]:
    return {
        "model": {"kind": "module", "build": "mypackage.model:build"},
        "data": {"corpus": "module", "batches": "mypackage.model:batch"},
        "train": {"num_steps": 3},
        **changes,
    }


def test_a_job_of_a_module_is_read_and_written() -> None:
    options = {"width": 8, "names": ["a", {"b": None}], "rate": 0.5, "deep": True}
    job = JobSpec.parse(job_body(model={"kind": "module", "build": "m:f", "options": options}))
    assert JobSpec.model_validate_json(job.model_dump_json()) == job
    assert functions_of(job) == {"model.build": "m:f", "data.batches": "mypackage.model:batch"}
    assert job.num_groups == 1
    with pytest.raises(ValidationError):
        job.model.build = "m:g"  # type: ignore[union-attr, misc]


@pytest.mark.parametrize(
    "code",
    ["a.b", "a:b.c", "a:b:c", "1a:b", "a..b:c", ":c", "a:", "a b:c", "class:x", "a:lambda", "ä:b", "a:*", "a.:b",
     ".a:b", "a:b ", "a:b()", "../a:b", "a/b:c", "a" * 254 + ":b", "", ":"],
)  # fmt: skip
def test_a_function_is_named_exactly(code: str) -> None:
    with expect_problem("invalid_value", "model.build", code):
        JobSpec.parse(job_body(model={"kind": "module", "build": code}))
    with expect_problem("invalid_value", "data.batches", code):
        JobSpec.parse(job_body(data={"corpus": "module", "batches": code}))


WRONG: list[tuple[dict[str, Any], ProblemCode, str, Any]] = [
    ({"model": {"kind": "module"}}, "missing", "model.build", None),
    ({"model": {"kind": "module", "build": "a:b", "moe": {}}}, "unknown_key", "model.moe", {}),
    ({"data": {"corpus": "catalogs"}}, "not_applicable", "data.corpus", "catalogs"),
    ({"model": {"preset": "gshard-tiny"}}, "not_applicable", "model.kind", "translation"),
    ({"model": {"kind": "module", "build": "a:b", "options": {"x y": 1}}}, "invalid_value", "model.options", None),
    ({"model": {"kind": "module", "build": "a:b", "options": {"x": [{"y": float("inf")}]}}}, "wrong_type",
     "model.options", None),
    ({"train": {"num_steps": 3, "batch_tokens": 128}}, "not_applicable", "train.batch_tokens", 128),
    ({"train": {"num_steps": 3, "evaluation": {"every_steps": 1}}}, "not_applicable", "train.evaluation", None),
    ({"parallel": {"expert": 2}}, "not_applicable", "parallel.expert", 2),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "code", "path", "value"), WRONG)
def test_a_wrong_spec_is_refused(changes: dict[str, Any], code: ProblemCode, path: str, value: Any) -> None:
    with expect_problem(code, path, value):
        JobSpec.parse(job_body(**changes))


def test_the_planner_of_dimensions_says_that_there_are_none() -> None:
    with expect_problem("unsupported", "model.kind", "module"):
        plan_job(JobSpec.parse(job_body()), Cluster(num_nodes=1, devices_per_node=2))


def test_code_is_allowed_by_its_full_name_only() -> None:
    job, names = JobSpec.parse(job_body()), ("mypackage.model:build", "mypackage.model:batch")
    check_allowed(job, names)
    check_allowed(JobSpec.parse(job_body(model={"preset": "gshard-tiny"}, data={"corpus": "catalogs"})), ())
    similar = ("mypackage.model", "mypackage.model:*", "mypackage:build", "mypackage.model:build2", "model:build",
               "mypackage.model:Build", "mypackage.model:batch")  # fmt: skip
    with expect_problem("not_allowed", "model.build", "mypackage.model:build"):
        check_allowed(job, similar)
    with expect_problems([("not_allowed", "model.build", names[0]), ("not_allowed", "data.batches", names[1])]):
        check_allowed(job, ())


def test_settings_hold_exact_functions_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings().allowed_code == ()
    monkeypatch.setenv("SHARDYARD_ALLOWED_CODE", '["mypackage.model:build"]')
    assert Settings().allowed_code == ("mypackage.model:build",)
    for wrong in ("mypackage.*:build", "mypackage.model", "m:f.g", "m:*", ""):
        with pytest.raises(ValidationError, match="must contain only module:function"):
            Settings(allowed_code=(wrong,))


def test_a_function_that_cannot_be_imported_is_refused() -> None:
    for name, code in (
        ("no_such_package.model:build", "not_found"), ("json:no_such_function", "not_found"), ("math:pi", "wrong_type"),
    ):  # fmt: skip
        with expect_problem(code, "model.build", name):
            import_function(name, "model.build")
    assert import_function("math:sqrt", "model.build")(4.0) == 2.0

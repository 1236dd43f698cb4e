"""A user's own module in a job: what may be written, and what is told of the rest."""

from typing import Any

import pytest
from pydantic import ValidationError

from moe.plan import Cluster, plan_job
from moe.spec import JobSpec, SpecError
from moe.tasks.module.code import check_allowed, functions_of, import_function
from service.settings import Settings
from tests.refusals import refused, refused_for


def given(**changes: Any) -> dict[str, Any]:
    return {
        "model": {"kind": "module", "build": "mypackage.model:build"},
        "data": {"corpus": "module", "batches": "mypackage.model:batch"},
        "train": {"num_steps": 3},
        **changes,
    }


def test_a_job_of_a_module_is_read_and_written() -> None:
    options = {"width": 8, "names": ["a", {"b": None}], "rate": 0.5, "deep": True}
    job = JobSpec.parse(given(model={"kind": "module", "build": "m:f", "options": options}))
    assert JobSpec.model_validate_json(job.model_dump_json()) == job
    assert functions_of(job) == {"model.build": "m:f", "data.batches": "mypackage.model:batch"}
    assert job.num_groups == 1
    with pytest.raises(ValidationError):
        job.model.build = "m:g"  # type: ignore[union-attr, misc]


REMEDY = "; name one function of an importable module, such as mypackage.model:build"


@pytest.mark.parametrize(
    "code",
    ["a.b", "a:b.c", "a:b:c", "1a:b", "a..b:c", ":c", "a:", "a b:c", "class:x", "a:lambda", "ä:b", "a:*", "a.:b",
     ".a:b", "a:b ", "a:b()", "../a:b", "a/b:c", "a" * 254 + ":b", "", ":"],
)  # fmt: skip
def test_a_function_is_named_exactly(code: str) -> None:
    for changes in ({"model": {"kind": "module", "build": code}}, {"data": {"corpus": "module", "batches": code}}):
        with pytest.raises(SpecError, match="must be module:function") as error:
            JobSpec.parse(given(**changes))
        (problem,) = error.value.problems
        assert (problem.path, problem.value) in (("model.build", code), ("data.batches", code))
        assert problem.remedy == REMEDY[2:]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no function": ({"model": {"kind": "module"}}, "model.build is required; add it"),
    "unknown key": (
        {"model": {"kind": "module", "build": "a:b", "moe": {}}},
        "model.moe (={}) is not a known key; remove it, or check its spelling",
    ),
    "another corpus": (
        {"data": {"corpus": "catalogs"}},
        "data.corpus (='catalogs') does not apply to a module model; "
        "use corpus module, with the function that returns batches",
    ),
    "another model": (
        {"model": {"preset": "gshard-tiny"}},
        "model.kind (='translation') cannot use a module's batches; use kind module, or another corpus",
    ),
    "no argument's name": (
        {"model": {"kind": "module", "build": "a:b", "options": {"x y": 1}}},
        "model.options must have argument names as keys, and 'x y' is not one; rename it",
    ),
    "no number": (
        {"model": {"kind": "module", "build": "a:b", "options": {"x": [{"y": float("inf")}]}}},
        "model.options must be JSON: text, finite numbers, true, false, null, lists, and mappings with text "
        "keys; use only these",
    ),
    "tokens": (
        {"train": {"num_steps": 3, "batch_tokens": 128}},
        "train.batch_tokens (=128) does not apply to a user's module; "
        "omit it: the module's own code decides it",
    ),
    "held-out sets": (
        {"train": {"num_steps": 3, "evaluation": {"every_steps": 1}}},
        "train.evaluation does not apply to a user's module; "
        "omit it: the module's own code decides it",
    ),
    "degrees": (
        {"parallel": {"expert": 2}},
        "parallel.expert (=2) does not apply to a user's module; "
        "omit it: the layout follows from the module's graph",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_a_wrong_one_is_told(name: str) -> None:
    changes, words = WRONG[name]
    with pytest.raises(SpecError) as error:
        JobSpec.parse(given(**changes))
    assert str(error.value) == words


def test_the_planner_of_dimensions_says_that_there_are_none() -> None:
    with refused("unsupported", "model.kind", "module"):
        plan_job(JobSpec.parse(given()), Cluster(num_nodes=1, devices_per_node=2))


def test_code_is_allowed_by_its_whole_name_alone() -> None:
    job = JobSpec.parse(given())
    check_allowed(job, ("mypackage.model:build", "mypackage.model:batch"))
    check_allowed(JobSpec.parse(given(model={"preset": "gshard-tiny"}, data={"corpus": "catalogs"})), ())
    near = ("mypackage.model", "mypackage.model:*", "mypackage:build", "mypackage.model:build2", "model:build",
            "mypackage.model:Build", "mypackage.model:batch")  # fmt: skip
    with refused("not_allowed", "model.build", "mypackage.model:build") as error:
        check_allowed(job, near)
    (problem,) = error.value.problems
    assert (problem.path, problem.value) == ("model.build", "mypackage.model:build")
    assert problem.remedy.startswith("ask the operator to add it to SHARDYARD_ALLOWED_CODE, or use one of ")
    with refused_for(
        [
            ("not_allowed", "model.build", "mypackage.model:build"),
            ("not_allowed", "data.batches", "mypackage.model:batch"),
        ]
    ) as error:
        check_allowed(job, ())
    assert [each.path for each in error.value.problems] == ["model.build", "data.batches"]


def test_settings_hold_exact_functions_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings().allowed_code == ()
    monkeypatch.setenv("SHARDYARD_ALLOWED_CODE", '["mypackage.model:build"]')
    assert Settings().allowed_code == ("mypackage.model:build",)
    for wrong in ("mypackage.*:build", "mypackage.model", "m:f.g", "m:*", ""):
        with pytest.raises(ValidationError, match="must contain only module:function"):
            Settings(allowed_code=(wrong,))


def test_a_function_that_cannot_be_had_is_told_of() -> None:
    with refused("not_found", "model.build", "no_such_package.model:build"):
        import_function("no_such_package.model:build", "model.build")
    with refused("not_found", "model.build", "json:no_such_function"):
        import_function("json:no_such_function", "model.build")
    with refused("wrong_type", "model.build", "math:pi"):
        import_function("math:pi", "model.build")
    assert import_function("math:sqrt", "model.build")(4.0) == 2.0

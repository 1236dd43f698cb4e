"""The digest of what a plan was made for: the values in a spec that are not defaults."""

import copy
import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.plan import Cluster
from moe.plan.plan_file import made_for, non_default_fields
from moe.spec import JobSpec, SpecError
from moe.spec.routers import ROUTERS
from tests.unit.test_spec import job
from tests.unit.test_spec_mutations import places, specs

CLUSTER = Cluster(num_nodes=1, devices_per_node=2, device="cpu", memory_bytes=1 << 30)
EVERY = list(specs())
FREE = ("name", "labels", "storage", "start_from", "retry", "checkpoint")


def digest_of(spec: JobSpec) -> str:
    return made_for(spec, CLUSTER).spec


def digest(fields: dict[str, Any]) -> str:
    return digest_of(JobSpec.parse(fields, accepted=True))


def resolved_json(spec: JobSpec) -> str:
    """All fields that planning reads, with every default, as JSON: a user's module may tell 8 from 8.0."""
    return json.dumps(spec.resolved.model_dump(mode="json", exclude=set(FREE)), sort_keys=True)


def put(fields: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    fields = copy.deepcopy(fields)
    *parents, last = path
    parent: Any = fields
    for key in parents:
        parent = parent[key]
    parent[last] = value
    return fields


@pytest.mark.parametrize("fields", EVERY, ids=range(len(EVERY)))
def test_defaults_written_out_are_the_same_as_left_out(fields: dict[str, Any]) -> None:
    """And a spec that is dumped and parsed again is the same."""
    spec = JobSpec.parse(fields)
    for unset in (False, True):
        dump = spec.model_dump(mode="json", exclude_unset=unset)
        assert digest_of(JobSpec.parse(dump)) == digest_of(spec)


@given(st.sampled_from(EVERY), st.data())
def test_specs_have_one_digest_where_they_ask_for_the_same_and_only_there(fields, data) -> None:
    """Each place in the spec gets other values: words that are valid elsewhere, numbers nearby, null."""
    path = data.draw(st.sampled_from([path for path in places(fields) if path[0] not in FREE]))
    current = fields
    for key in path:
        current = current[key]
    values: list[Any] = [None, True, False, 1, 2, 4, 0.5, "gelu", "swiglu", *ROUTERS, "mixtral-8x7b", {}]
    if isinstance(current, int | float) and not isinstance(current, bool):
        values += [current * 2, current + 1, float(current)]
    spec = JobSpec.parse(fields, accepted=True)
    for value in values:
        with suppress(SpecError):
            variant = JobSpec.parse(put(fields, path, value), accepted=True)
            assert (digest_of(spec) == digest_of(variant)) == (resolved_json(spec) == resolved_json(variant))


def test_kinds_with_nothing_but_defaults_have_different_digests() -> None:
    """Routers, position scalings, optimizers: kinds that differ in their name alone."""
    moe = [
        {"router": name, **({"later_tokens_choose_too": "accepted"} if name == "expert_choice" else {})}
        for name in ROUTERS
    ]
    scalings: list[dict[str, Any]] = [{"kind": "linear", "factor": 4.0}]
    scalings += [{"kind": kind, "factor": 4.0, "original_tokens": 4096} for kind in ("dynamic", "llama3", "yarn")]
    specs = [
        *(job(model={"moe": fields}) for fields in moe),
        *({"model": {"preset": "mixtral-8x7b", "attention": {"rope": {"scaling": scaling}}},
           "data": {"corpus": "synthetic"}, "train": {"num_steps": 1, "batch_tokens": 8192}} for scaling in scalings),
        *(job(train={"optimizer": {"name": name}}) for name in ("adamw", "adafactor")),
    ]  # fmt: skip
    assert len({digest(spec) for spec in specs}) == len(specs) - 1  # `job()` has adamw and gshard_top2


def test_what_a_spec_does_not_use_is_no_part_of_it() -> None:
    """So digests stay the same when a field is added."""
    spec = JobSpec.parse(job()).resolved
    fields = non_default_fields(spec)
    assert fields["train"] == {"num_steps": 10, "batch_tokens": 1024, "label_smoothing": 0.1}
    assert fields["data"] == {"corpus": "catalogs", "target": "en"}  # the only possible value
    assert not fields.keys() & {"parallel", "resources", "retry", "labels"}
    assert non_default_fields(spec.model_copy(update={"name": "another"})) == {**fields, "name": "another"}
    left_out, said_in_words = (
        made_for(JobSpec.parse(job(train=changes)), CLUSTER) for changes in ({}, {"label_smoothing": 0.1, "freeze": []})
    )
    assert left_out == said_in_words
    frozen_spec = JobSpec.parse(job(train={"freeze": ["*.router"]}))
    assert made_for(frozen_spec, CLUSTER) != left_out

"""What a plan was made for: a digest of what the spec says beyond its defaults."""

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


def digest(given: dict[str, Any]) -> str:
    return digest_of(JobSpec.parse(given, accepted=True))


def asked(spec: JobSpec) -> str:
    """All that is planned for, every default written out: as JSON, since a module of one's own may tell 8 from 8.0."""
    return json.dumps(spec.resolved.model_dump(mode="json", exclude=set(FREE)), sort_keys=True)


def put(given: dict[str, Any], at: tuple[Any, ...], value: Any) -> dict[str, Any]:
    given = copy.deepcopy(given)
    *above, last = at
    parent: Any = given
    for key in above:
        parent = parent[key]
    parent[last] = value
    return given


@pytest.mark.parametrize("given", EVERY, ids=range(len(EVERY)))
def test_defaults_written_out_are_the_same_as_left_out(given: dict[str, Any]) -> None:
    """And a spec that is written and read again is the same."""
    spec = JobSpec.parse(given)
    for unset in (False, True):
        written = spec.model_dump(mode="json", exclude_unset=unset)
        assert digest(written) == digest(given)


@given(st.sampled_from(EVERY), st.data())
def test_specs_have_one_digest_where_they_ask_for_the_same_and_only_there(given, data) -> None:
    """One place after another has other values: words of the same place elsewhere, numbers nearby, nothing."""
    at = data.draw(st.sampled_from([at for at in places(given) if at[0] not in FREE]))
    now = given
    for key in at:
        now = now[key]
    others: list[Any] = [None, True, False, 1, 2, 4, 0.5, "gelu", "swiglu", *ROUTERS, "mixtral-8x7b", {}]
    if isinstance(now, int | float) and not isinstance(now, bool):
        others += [now * 2, now + 1, float(now)]
    spec = JobSpec.parse(given, accepted=True)
    for value in others:
        with suppress(SpecError):
            other = JobSpec.parse(put(given, at, value), accepted=True)
            assert (digest_of(spec) == digest_of(other)) == (asked(spec) == asked(other))


def test_kinds_with_nothing_but_defaults_have_different_digests() -> None:
    """Routers, scalings of positions, optimizers: they differ in their names only."""
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
    assert len({digest(spec) for spec in specs}) == len(specs) - 1  # adamw and gshard_top2 are what `job()` has


def test_what_a_spec_does_not_use_is_no_part_of_it() -> None:
    """So that a field which is added later leaves digests as they are."""
    spec = JobSpec.parse(job()).resolved
    told = non_default_fields(spec)
    assert told["train"] == {"num_steps": 10, "batch_tokens": 1024, "label_smoothing": 0.1}
    assert told["data"] == {"corpus": "catalogs", "target": "en"}  # that it can be but one
    assert not told.keys() & {"parallel", "resources", "retry", "labels"}
    assert non_default_fields(spec.model_copy(update={"name": "another"})) == {**told, "name": "another"}
    left_out, said_in_words = (
        made_for(JobSpec.parse(job(train=changes)), CLUSTER) for changes in ({}, {"label_smoothing": 0.1, "freeze": []})
    )
    assert left_out == said_in_words
    frozen = JobSpec.parse(job(train={"freeze": ["*.router"]}))
    assert made_for(frozen, CLUSTER) != left_out

"""The default of `model.moe.group_tokens`, which fits every sequence length."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.plan import Cluster, plan_request
from moe.plan.search.what_if import grid
from moe.spec import JobSpec, SpecError
from moe.spec.groups import with_group
from tests.refusals import expect_problem

MODEL: dict[str, Any] = {
    "kind": "language", "model_dim": 32, "num_layers": 2, "vocab_size": 300,
    "attention": {"kind": "grouped_query", "num_heads": 2, "num_kv_heads": 2, "head_dim": 16},
    "moe": {"router": "softmax_topk", "num_experts": 4, "hidden_dim": 16, "activation": "swiglu"},
}  # fmt: skip
FOLDER = {**MODEL, "from": "/models/base"}
PRESET = {"preset": "mixtral-8x7b"}


def job(model: dict[str, Any], max_tokens: int | None, batch_tokens: int = 65_536) -> dict[str, Any]:
    data = {"corpus": "packages"} if max_tokens is None else {"corpus": "packages", "max_tokens": max_tokens}
    return {"model": model, "data": data, "train": {"num_steps": 1, "batch_tokens": batch_tokens}}


@pytest.mark.parametrize(
    ("model", "max_tokens", "batch_tokens", "expected"),
    [
        (FOLDER, None, 65_536, 512), (FOLDER, 256, 65_536, 256), (FOLDER, 16_384, 65_536, 16_384),
        (PRESET, 512, 65_536, 4096), (PRESET, 4096, 65_536, 4096), (PRESET, 8192, 65_536, 8192),
        (PRESET, 512, 2048, 512), (PRESET, 3000, 6000, 3000),
        (MODEL, None, 65_536, 1024), (MODEL, 1024, 65_536, 1024), (MODEL, 2048, 65_536, 2048), (MODEL, 768, 1536, 768),
    ],
)  # fmt: skip
def test_a_folder_has_groups_of_one_sequence_and_others_their_default_if_it_fits_sequences_and_batch(
    model: dict[str, Any], max_tokens: int, batch_tokens: int, expected: int
) -> None:
    assert JobSpec.parse(job(model, max_tokens, batch_tokens)).group_tokens == expected


@given(
    st.sampled_from([MODEL, FOLDER, PRESET]), st.sampled_from([256, 512, 1024, 4096]),
    st.sampled_from([1000, 1024, 4096]),
)  # fmt: skip
def test_a_given_group_stays(model: dict[str, Any], max_tokens: int, group_tokens: int) -> None:
    body = job({**model, "moe": {**model.get("moe", {}), "group_tokens": group_tokens}}, max_tokens)
    assert with_group(body) == body
    if group_tokens % max_tokens:
        with pytest.raises(SpecError) as error:
            JobSpec.parse(body)
        assert "model.moe.group_tokens" in {problem.path for problem in error.value.problems}
    else:
        assert JobSpec.parse(body).group_tokens == group_tokens


def test_a_stored_job_keeps_its_group() -> None:
    body = JobSpec.parse(job(FOLDER, 256)).model_dump(mode="json")
    body["model"]["moe"]["group_tokens"] = 1024
    assert JobSpec.parse(body).group_tokens == JobSpec.parse(body, accepted=True).group_tokens == 1024
    assert JobSpec.parse(job(FOLDER, 256), accepted=True).group_tokens == 1024, "as earlier releases read it"


def test_groups_follow_other_lengths_of_sequences() -> None:
    request = plan_request(job(FOLDER, 1024))
    assert "group_tokens" not in request.spec.model_dump(exclude_unset=True)["model"]["moe"]
    cells = grid(request, Cluster(num_nodes=1, devices_per_node=1, device="h100"), {"max_tokens": ["512", "4096"]})
    assert all(cell.plan is not None for cell in cells), [cell.why_not for cell in cells]


@pytest.mark.parametrize("model", [FOLDER, MODEL, PRESET], ids=["folder", "model", "preset"])
def test_a_batch_without_whole_sequences_is_refused_by_its_own_field(model: dict[str, Any]) -> None:
    with expect_problem("not_divisible", "train.batch_tokens", 6000):
        JobSpec.parse(job(model, 4096, 6000))


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({}, "model"), ({"model": 3}, "model"), ({"model": FOLDER}, "data"),
        (job({**FOLDER, "moe": 3}, 512), "model.moe"), (job({**FOLDER, "moe": None}, 512), "model.ffn_dim"),
        (job({"preset": "nothing"}, 512), "model.preset"), (job({"preset": "gshard-tiny"}, 512), "data.corpus"),
        (job({"kind": "language", "preset": ["x"]}, 512), "model.preset"),
        (job({"kind": "module"}, 512), "model.build"), ({**job(FOLDER, 512), "data": 3}, "data"),
        ({**job(FOLDER, 512), "data": {"corpus": "packages", "max_tokens": "many"}}, "data.max_tokens"),
    ],
)  # fmt: skip
def test_mistakes_elsewhere_are_reported_there(body: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError) as error:
        JobSpec.parse(body)
    assert path in {problem.path for problem in error.value.problems}
    assert "group_tokens" not in str(error.value)

"""Jobs that lack a model's weights: planned by the service, on its own cluster too, and never queued."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.service.control_plane import ControlPlane, spec
from tests.unit.test_plans_without_weights import MIXTRAL

CHAT = {"corpus": "chat", "paths": ["{data}/chat.jsonl"]}
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
         "vocab_size": 512, "intermediate_size": 96}  # fmt: skip


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Any:
    data = tmp_path_factory.mktemp("data")
    (data / "config.json").write_text(json.dumps({**MIXTRAL, **SMALL}))
    (data / "chat.jsonl").write_text('{"prompt": "q", "completion": "a"}\n')
    plane = ControlPlane(tmp_path_factory.mktemp("plane"), data_roots=[str(data)]).start()
    plane.data = data  # type: ignore[attr-defined]
    yield plane
    plane.close()


def test_a_synthetic_corpus_is_planned_on_the_cluster_at_hand(plane: ControlPlane) -> None:
    """As it is on a cluster that is named; and never queued."""
    small = {"preset": "olmoe-1b-7b", "model_dim": 64, "num_layers": 2, "vocab_size": 512}
    job = spec(model=small, data={"corpus": "synthetic", "max_tokens": 256})
    cluster = {"num_nodes": 1, "devices_per_node": 1}
    for body in (job, {"spec": job, "cluster": cluster}):
        plan = plane.http.post("/v1/plans", json=body)
        assert plan.status_code == 200, plan.text
        assert [each.split()[0] for each in plan.json()["missing"]] == ["data.corpus"]
    refused = plane.http.post("/v1/jobs", json=job)
    assert (refused.status_code, [each["path"] for each in refused.json()["errors"]]) == (422, ["data.corpus"])


@pytest.mark.parametrize("data", [CHAT, {"corpus": "packages"}], ids=["chat", "packages"])
@pytest.mark.parametrize("model", ["bare folder", "bare file", "preset"])
def test_they_are_planned_and_not_queued(plane: ControlPlane, model: str, data: dict[str, Any]) -> None:
    folder: Path = plane.data  # type: ignore[attr-defined]
    small = {"model_dim": 64, "num_layers": 2, "vocab_size": 512, "moe": {"hidden_dim": 96},
             "attention": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}}  # fmt: skip
    named = {"bare folder": {"from": str(folder)}, "bare file": {"from": f"{folder}/config.json"},
             "preset": {"preset": "mixtral-8x7b", **small}}[model]  # fmt: skip
    job = json.loads(json.dumps(spec(model=named, data=data, adapter={"rank": 4})).replace("{data}", str(folder)))
    cluster = {"num_nodes": 1, "devices_per_node": 1, "device": "h100"}
    for body in (job, {"spec": job, "cluster": cluster}):
        plan = plane.http.post("/v1/plans", json=body)
        assert plan.status_code == 200, plan.text
        (needed,) = plan.json()["missing"]
        assert needed.startswith("model.from")
    refused = plane.http.post("/v1/jobs", json=job)
    assert refused.status_code == 422, refused.text
    assert [error["path"] for error in refused.json()["errors"]] == ["model.from"]
    assert plane.http.get("/v1/jobs").json()["items"] == []


def test_what_else_is_wrong_with_them_is_told(plane: ControlPlane) -> None:
    folder: Path = plane.data  # type: ignore[attr-defined]
    job = spec(model={"from": str(folder)}, data={"corpus": "packages"}, adapter={"rank": 4}, storage="/elsewhere")
    answer = plane.http.post("/v1/plans", json=job)
    assert (answer.status_code, answer.json()["errors"][0]["path"]) == (422, "storage")

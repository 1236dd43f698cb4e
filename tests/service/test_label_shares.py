"""Shares of experts by label: each evaluation's, the most specialized layers first, of bounded size, whatever a record
has."""

import json
from typing import Any

import pytest

from moe.records import LabelLayerRecord, LabelLoads, StepRecord
from tests.service.silent_run import Run, metric

NOTHING = {"step": None, "time": None, "kind": None, "labels": [], "layers": [], "shares": []}


def evaluated_step(step: int, loads: LabelLoads) -> dict[str, Any]:
    return metric(**json.loads(json.dumps(StepRecord(step=step, loss=1.0, label_loads=loads).to_plain())))


def shares_of(run: Run, **query: Any) -> Any:
    answer = run.plane.http.get(f"/v1/jobs/{run.id}/experts/labels", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def loads_of(*layers: tuple[int, tuple[tuple[int, ...], ...]]) -> LabelLoads:
    return LabelLoads("language", ("de", "ja"), tuple(LabelLayerRecord(*layer) for layer in layers))


def test_shares_of_the_newest_evaluation_and_of_an_earlier_one(run: Run) -> None:
    assert shares_of(run) == NOTHING
    alike, half, apart = ((30, 10), (3, 1)), ((30, 10), (1, 3)), ((40, 0), (0, 4))
    run.send(
        0, metric(1), evaluated_step(2, loads_of((1, alike))), metric(3),
        evaluated_step(4, loads_of((1, alike), (2, half), (5, apart))), metric(5),
    )  # fmt: skip
    answer = shares_of(run, max_layers=2)
    assert (answer["step"], answer["kind"], answer["labels"]) == (4, "language", ["de", "ja"])
    assert answer["layers"] == [
        {"layer": 5, "num_experts": 2, "specialization": 0.5},
        {"layer": 2, "num_experts": 2, "specialization": 0.25},
        {"layer": 1, "num_experts": 2, "specialization": 0.0},
    ]
    assert answer["shares"] == [
        {"layer": 5, "num_experts": 2, "experts_per_bucket": 1, "choices": [40, 4], "shares": [[1.0, 0.0], [0.0, 1.0]]},
        {"layer": 2, "num_experts": 2, "experts_per_bucket": 1, "choices": [40, 4],
         "shares": [[0.75, 0.25], [0.25, 0.75]]},
    ]  # fmt: skip
    assert [layer["layer"] for layer in shares_of(run, layer=[1, 9])["shares"]] == [1]
    earlier = shares_of(run, until_step=3)
    assert (earlier["step"], [layer["layer"] for layer in earlier["layers"]]) == (2, [1])
    assert shares_of(run, until_step=1) == NOTHING


def test_neighbouring_experts_share_a_bucket_that_has_their_sum(run: Run) -> None:
    loads = (tuple(range(100)), (1,) * 99 + (0,))
    run.send(0, evaluated_step(1, loads_of((1, loads))))
    (layer,) = shares_of(run, max_experts=32)["shares"]
    assert layer["experts_per_bucket"] == 4
    assert [len(row) for row in layer["shares"]] == [25, 25]
    assert layer["shares"][0][1] == pytest.approx((4 + 5 + 6 + 7) / 4950, abs=1e-5)
    assert [sum(row) for row in layer["shares"]] == pytest.approx([1.0, 1.0], abs=1e-3)


@pytest.mark.parametrize(
    "layers",
    [
        [{"layer": 1, "load": [[1, 2]]}],
        [{"layer": 1, "load": [[1, 2], [3]]}],
        [{"layer": 1, "load": [[], []]}],
        [{"layer": 1, "load": [[1, -2], [3, 4]]}],
        [{"layer": 1, "load": [[1, 10**30], [3, 4]]}],
        [],
    ],
    ids=str,
)
def test_layers_that_do_not_fit_the_labels_are_left_out(run: Run, layers: list[Any]) -> None:
    run.send(0, metric(1, label_loads={"kind": "source", "labels": ["a", "b"], "layers": layers}))
    answer = shares_of(run)
    assert (answer["step"], answer["layers"], answer["shares"]) == (1, [], [])


@pytest.mark.parametrize("loads", ["text", [1], {"kind": "source"}, {"kind": 1, "labels": [], "layers": []}], ids=str)
def test_a_record_without_readable_loads_has_none(run: Run, loads: Any) -> None:
    run.send(0, metric(1, label_loads=loads))
    assert shares_of(run) == NOTHING


def test_the_last_metric_and_histories_have_loads_by_label_only_by_name(run: Run) -> None:
    loads = loads_of((1, ((1, 0), (0, 1))))
    run.send(0, evaluated_step(1, loads))
    assert "label_loads" not in run.plane.job(run.id)["last_metric"]
    assert all("label_loads" not in point for point in run.plane.metrics(run.id))
    (point,) = run.plane.metrics(run.id, name="label_loads")
    assert LabelLoads.read(point["label_loads"]) == loads

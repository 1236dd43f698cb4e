"""Curves: thinned with their extremes, each step once; expert loads: bounded, the worst-balanced layers first."""

import json
import math
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import to_json

from moe.records import LayerRecord, StepRecord
from service.control.report import curve_store
from service.control.report.curve_store import CHUNK_EVENTS, CurveStore
from service.control.report.curves import MAX_NAMES, JobCurves, thin
from service.control.report.event_text import data_text
from service.control.report.hub import Hub
from service.control.report.ingest import Ingest
from service.control.report.tokens import TokenMint
from service.control.store.curve_chunks import chunks_after
from service.control.store.database import Database
from service.control.store.events import MetricRow, NewEvent, append_events, delete_oldest_events
from service.control.store.jobs import JobRow, delete_job, insert_job
from service.wire.events import Record
from tests.service.databases import BOTH_DATABASES
from tests.service.silent_run import Run, metric

VALUES = st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=300)


@given(VALUES, st.integers(1, 60))
def test_thinned_values_include_ends_and_extremes(values: list[float], max_points: int) -> None:
    array = np.array(values)
    indices = thin(array, max_points)
    assert len(indices) <= max_points
    assert list(indices) == sorted(set(indices))
    assert indices[-1] == len(values) - 1
    if max_points >= 5:  # of both ends, the least, the greatest and one that is not a number
        assert indices[0] == 0
        finite = array[~np.isnan(array)]
        kept = array[indices]
        if len(finite):
            assert (np.nanmin(kept), np.nanmax(kept)) == (finite.min(), finite.max())
        assert np.isnan(kept).any() == np.isnan(array).any()


recorded = st.tuples(
    st.integers(1, 8), st.integers(1, 3), st.integers(0, 2), st.none() | st.floats(-9, 9) | st.integers()
)


@given(st.lists(recorded, min_size=1, max_size=40), st.integers(1, 5))
def test_columns_are_the_newest_records_of_each_step(records: list[tuple[int, int, int, Any]], portion: int) -> None:
    curves, packed, newest = JobCurves(), JobCurves(), {}
    rows = []
    for id, (step, attempt, group, loss) in enumerate(records, 1):
        layer = {"layer": 1, "load": [1, 2], "max_over_mean": 1.5}
        by_label = {"kind": "source", "labels": ['"layers":[{', "}]"], "layers": [{**layer, "load": [[1, 2], [3, 4]]}]}
        data = {"step": step, "loss": loss, "layers": [layer], "held_out": {'a"}],b': loss}, "flag": True}
        data |= {"samples": [{"prompt": "p"}], "label_loads": by_label} if id % 2 else {}
        rows.append(MetricRow(id, step, attempt, group, id * 1000, json.dumps(data, separators=(",", ":"))))
        newest[step] = max(newest.get(step, (0,)), (attempt, group, id, loss))
    for first in range(0, len(rows), portion):
        curves.extend(rows[first : first + portion])
        chunk = JobCurves()
        chunk.extend(rows[first : first + portion])
        packed.extend_packed(chunk.packed())
    assert packed.names == curves.names
    for name in ("samples", "label_loads"):
        assert packed.text_ids(name, 2, 7, 100) == curves.text_ids(name, 2, 7, 100)
    for name in ("loss", 'held_out.a"}],b'):
        curve = curves.curve(name, 0, None, 1000)
        expected = [newest[step][3] for step in sorted(newest)]
        assert (curve.step, curve.attempt) == (sorted(newest), [newest[step][0] for step in sorted(newest)])
        assert curve.value == [None if loss is None else _as_float(loss) for loss in expected]
        assert packed.curve(name, 0, None, 1000) == curve
    assert set(curves.names) == {"loss", 'held_out.a"}],b'}
    assert curves.step_ids(2, 5, 100) == [newest[step][2] for step in sorted(newest) if 2 <= step <= 5]


def _as_float(number: float) -> float | None:
    try:
        return float(number)
    except OverflowError:
        return None


@BOTH_DATABASES
def test_events_are_packed_as_they_arrive_and_not_parsed_again(database: Database) -> None:
    job = _running_job(database)
    ingest = Ingest(database, Hub(), TokenMint(b"key"), on_phase=lambda: None)
    num_steps = CHUNK_EVENTS + 10
    records = [_record(step, loss=1 / step) for step in range(1, num_steps + 1)]
    for first in (0, num_steps // 2):
        assert ingest.take_over(job.id, 1, "group-0", first, records[first : first + num_steps // 2])
    with database.write() as tx:
        assert [chunk[:2] for chunk in chunks_after(tx, job.number, 0)] == [(0, CHUNK_EVENTS)]
        assert delete_oldest_events(tx, job.number, CHUNK_EVENTS)  # whose numbers the chunk has
    with CurveStore(database).read(job.number) as columns:
        curve = columns.curve("loss", 0, None, num_steps)
    assert curve.step == [*range(1, num_steps + 1)]
    assert curve.value == [1 / step for step in curve.step]
    with database.write() as tx:
        delete_job(tx, job.number)
        assert [*chunks_after(tx, job.number, 0)] == []


@BOTH_DATABASES
def test_events_of_an_earlier_release_are_packed_by_the_first_reader(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curve_store, "CHUNK_EVENTS", 4)
    job, reader = _running_job(database), CurveStore(database)
    for begin in (1, 7, 13):
        with database.write() as tx:
            events = [
                NewEvent("metric", 1, 1, "group-0", data_text({"step": step, "loss": step}), step)
                for step in range(begin, begin + 6)
            ]
            append_events(tx, job.number, events)
        for curves in (reader, CurveStore(database)):  # one whose columns end within the next chunk, and a new one
            with curves.read(job.number) as columns:
                assert columns.curve("loss", 0, None, 100).step[-6:] == [*range(begin, begin + 6)]
                assert columns.num_steps() == len(columns.curve("loss", 0, None, 100).step)
    with database.read() as tx:
        assert [chunk[:2] for chunk in chunks_after(tx, job.number, 0)] == [(0, 4), (4, 8), (8, 12), (12, 16)]


def _running_job(database: Database) -> JobRow:
    values = {"id": "job-aaaaaaaaaaaa", "owner": "o", "name": "n", "spec": "{}", "storage": "/s", "state": "running",
              "reason": "r", "num_steps": 1, "created_at": 1, "updated_at": 1, "queued_at": 1, "attempt": 1,
              "launch": "submitted"}  # fmt: skip
    with database.write() as tx:
        return insert_job(tx, values, {})


def _record(step: int, **values: float) -> Record:
    return Record(kind="metric", time=datetime(2026, 1, 31, tzinfo=UTC), data={"step": step, **values})


@BOTH_DATABASES
def test_metrics_of_one_name_keep_their_extremes(run: Run) -> None:
    peak, fall, nan = 317, 512, 700
    losses = {peak: 99.0, fall: -99.0, nan: None}
    run.send(0, *(metric(step, loss=losses.get(step, 1.0)) for step in range(1, 1001)))
    points = {point["step"]: point["loss"] for point in run.plane.metrics(run.id, name="loss", max_points=20)}
    assert len(points) <= 20
    assert {step: points[step] for step in (1, peak, fall, nan, 1000)} == {
        1: 1.0,
        peak: 99.0,
        fall: -99.0,
        nan: None,
        1000: 1.0,
    }
    answer = run.plane.http.get(f"/v1/jobs/{run.id}/curves", params={"name": ["loss", "none"], "max_points": 20}).json()
    assert answer["names"] == ["loss"]
    assert answer["num_steps"] == 1000
    assert answer["last_event_id"] == run.num_events()
    assert dict(zip(answer["curves"]["loss"]["step"], answer["curves"]["loss"]["value"], strict=True)) == points
    run.send(1000, metric(1001, loss=7.0, held_out={"books": 2.5}))
    query = {"name": ["loss", "held_out.books"], "since_step": 1000}
    later = run.plane.http.get(f"/v1/jobs/{run.id}/curves", params=query).json()["curves"]
    assert (later["loss"]["step"], later["loss"]["value"]) == ([1000, 1001], [1.0, 7.0])
    assert (later["held_out.books"]["step"], later["held_out.books"]["value"]) == ([1001], [2.5])


@BOTH_DATABASES
def test_loads_of_4096_experts_are_bounded_and_the_worst_layer_is_first(run: Run) -> None:
    even, skewed = [10] * 4096, [10] * 4096
    skewed[4095], skewed[7] = 4_000, 0

    def step(number: int) -> dict[str, Any]:
        layers = (
            LayerRecord(1, tuple(even), 1.0),
            LayerRecord(3, tuple(skewed), 200.0),
            LayerRecord(5, tuple(even), 1.0),
        )
        return metric(**json.loads(to_json(StepRecord(step=number, loss=1.0, layers=layers).to_plain())))

    run.send(0, *map(step, range(1, 5)))
    run.send(4, *map(step, range(5, 9)))
    query = {"max_points": 3, "max_layers": 2, "max_experts": 128}
    answer = run.plane.http.get(f"/v1/jobs/{run.id}/experts", params=query).json()
    assert [(layer["layer"], layer["num_experts"], layer["num_unused"]) for layer in answer["layers"]] == [
        (3, 4096, 1), (1, 4096, 0), (5, 4096, 0),
    ]  # fmt: skip
    assert [step["step"] for step in answer["steps"]] == [1, 5, 8]
    worst, other = answer["loads"]
    assert (worst["layer"], worst["experts_per_bucket"], worst["steps"]) == (3, 32, [1, 5, 8])
    assert [len(row) for row in worst["load"]] == [128] * 3
    assert worst["load"][0][127] == worst["max_over_mean"][0] == round(4000 * 4096 / sum(skewed), 3)
    assert other["load"] == [[1.0] * 128] * 3
    chosen = run.plane.http.get(f"/v1/jobs/{run.id}/experts", params={"layer": 5}).json()
    assert [layer["layer"] for layer in chosen["loads"]] == [5]


def test_names_beyond_the_limit_are_left_out_and_the_answer_says_so(run: Run) -> None:
    def answer() -> Any:
        return run.plane.http.get(f"/v1/jobs/{run.id}/curves").json()

    run.send(0, metric(1, numbers={f"n{index}": 1.0 for index in range(MAX_NAMES - 50)}))
    assert not answer()["has_more_names"]
    run.send(1, metric(2, numbers={f"m{index}": 1.0 for index in range(MAX_NAMES)}))
    assert (len(answer()["names"]), answer()["has_more_names"]) == (MAX_NAMES, True)
    step = run.plane.http.get(f"/v1/jobs/{run.id}/metrics", params={"limit": 10}).json()["items"][-1]
    assert len(step["numbers"]) == MAX_NAMES
    run.end()


def test_packed_columns_say_whether_names_were_left_out() -> None:
    for num_names, has_more_names in ((MAX_NAMES, False), (MAX_NAMES + 1, True)):
        data = to_json({f"n{index}": index for index in range(num_names)}).decode()
        chunk, curves = JobCurves(), JobCurves()
        chunk.extend([MetricRow(1, 1, 1, 0, 1, data)])
        curves.extend_packed(chunk.packed())
        assert (len(curves.names), curves.has_more_names) == (MAX_NAMES, has_more_names)


@BOTH_DATABASES
def test_a_job_without_metrics_has_no_curves_and_no_loads(run: Run) -> None:
    answer = run.plane.http.get(f"/v1/jobs/{run.id}/curves", params={"name": "loss"}).json()
    assert (answer["names"], answer["num_steps"], answer["curves"]) == ([], 0, {})
    loads = run.plane.http.get(f"/v1/jobs/{run.id}/experts").json()
    assert loads == {"steps": [], "layers": [], "loads": []}


@BOTH_DATABASES
def test_a_stream_can_leave_out_loads_and_send_what_is_new_together(run: Run) -> None:
    layer = {"layer": 1, "load": [1, 2], "max_over_mean": 1.5}
    by_label = {"kind": "source", "labels": ["}]", '"layers":[{'], "layers": [{"layer": 1, "load": [[1, 0], [0, 2]]}]}
    run.send(0, metric(1, layers=[layer], lr=0.5), metric(2, layers=[layer], label_loads=by_label, lr=0.5))
    run.end()
    query = {"interval_s": 0.2, "loads": False}
    with run.plane.http.stream("GET", f"/v1/jobs/{run.id}/events", params=query) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]
    whole = list(run.plane.events(run.id))
    assert [event["id"] for event in events] == [event.id for event in whole]
    metrics = [event["data"] for event in events if event["kind"] == "metric"]
    assert metrics == [
        {**event.data, "layers": [], **({"label_loads": {**by_label, "layers": []}} if event.data["step"] == 2 else {})}
        for event in whole
        if event.kind == "metric"
    ]


@BOTH_DATABASES
def test_samples_and_losses_by_set_are_read_without_a_search(run: Run) -> None:
    samples = {step: [{"prompt": "a", "completion": str(step)}] for step in (3, 6, 9, 12)}
    steps = [metric(step, **({"samples": samples[step], "held_out": {"x": 1.0}} if step in samples else {}))
             for step in range(1, 15)]  # fmt: skip
    run.send(0, *steps)
    for max_points, expected in ((1, [12]), (2, [3, 12]), (10, [3, 6, 9, 12])):
        points = run.plane.metrics(run.id, name="samples", max_points=max_points)
        assert [(point["step"], point["samples"]) for point in points] == [(step, samples[step]) for step in expected]
    assert [point["held_out"] for point in run.plane.metrics(run.id, name="held_out")] == [{"x": 1.0}] * 4

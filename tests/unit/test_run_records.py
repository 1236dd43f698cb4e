"""Records: their JSON does not change between releases, and this release reads that of every earlier one.

`tests/golden/records` holds the records of a run of an earlier release; it is never rewritten.
"""

import json
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import to_json

from moe.records import CheckpointRecord, StepRecord, StoredCheckpoint, TranslationReport
from moe.records.json_record import JsonRecord
from moe.train.loop import Outcome
from moe.train.recorder import MemoryRecorder
from tests.unit.train_runs import corpus, job, run

GOLDEN = Path(__file__).parents[1] / "golden" / "records"
LINES = [json.loads(line) for line in (GOLDEN / "records.jsonl").read_text().splitlines()]
KINDS: dict[str, type[JsonRecord]] = {"metric": StepRecord, "checkpoint": CheckpointRecord}
RECORDS = [KINDS[line["kind"]].read(line["data"]) for line in LINES]
REPORT_TEXT = (GOLDEN / "report.json").read_text()
REPORT = TranslationReport.read(json.loads(REPORT_TEXT))

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def of_type(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of a field's type that JSON can hold."""
    plain = {
        NoneType: st.none(), int: st.integers(), float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    }  # fmt: skip
    if hint in plain:
        return plain[hint]
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if isinstance(hint, UnionType):
        return st.one_of(*map(of_type, get_args(hint)))
    if get_origin(hint) is tuple:
        return st.lists(of_type(get_args(hint)[0]), max_size=3).map(tuple)
    if get_origin(hint) is dict:
        return st.dictionaries(*map(of_type, get_args(hint)), max_size=3)
    return any_record(hint)


def any_record(kind: type[JsonRecord]) -> st.SearchStrategy[Any]:
    return st.builds(kind, **{name: of_type(hint) for name, hint in get_type_hints(kind).items()})


def round_trip(record: JsonRecord) -> Any:
    """The JSON of a record, parsed again."""
    return json.loads(to_json(record.to_plain()))


def shape(value: Any) -> Any:
    """Keys in order with types, down to the leaves; only the first item of a list counts."""
    if isinstance(value, dict):
        return [(key, shape(item)) for key, item in value.items()]
    if isinstance(value, list):
        return [shape(item) for item in value[:1]]
    return type(value).__name__


def test_what_an_earlier_release_wrote_is_written_again_to_the_byte() -> None:
    lines = [{**line, "data": record.to_plain()} for line, record in zip(LINES, RECORDS, strict=True)]
    assert b"".join(to_json(line) + b"\n" for line in lines) == (GOLDEN / "records.jsonl").read_bytes()
    assert json.dumps(REPORT.to_plain(), indent=1, ensure_ascii=False) == REPORT_TEXT


@pytest.fixture(scope="module")
def job_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, MemoryRecorder]:
    folder = tmp_path_factory.mktemp("run")
    evaluation = {"max_pairs": 6, "num_examples": 3, "every_steps": 2}
    spec = job(corpus(folder), train={"num_steps": 2, "evaluation": evaluation})
    return run(spec, folder / "storage", folder / "cache")


def test_a_run_records_the_same_keys_in_the_same_order(job_run: tuple[Outcome, MemoryRecorder]) -> None:
    outcome, recorder = job_run
    assert outcome.report is not None
    records = [*recorder.metrics, *recorder.checkpoints, outcome.report]
    assert [type(record).read(round_trip(record)) for record in records] == records
    expected = [*(line["data"] for line in LINES), json.loads(REPORT_TEXT)]
    written = [round_trip(record) for record in records]
    assert written[1].pop("label_loads"), "recorded since a later release"
    assert [shape(value) for value in written] == [shape(value) for value in expected]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [*KINDS.values(), TranslationReport, StoredCheckpoint])
@given(data=st.data())
def test_any_record_is_read_as_it_was_written(kind: type[JsonRecord], data: Any) -> None:
    record = data.draw(any_record(kind))
    assert kind.read(round_trip(record)) == record


def with_later(value: Any, extra: Any) -> Any:
    """JSON of a record in which each record has an additional, unknown key."""
    if isinstance(value, JsonRecord):
        fields = {name: with_later(getattr(value, name), extra) for name in value.to_plain()}
        return {"later": extra, **fields}
    if isinstance(value, dict):
        return {key: with_later(item, extra) for key, item in value.items()}
    return [with_later(item, extra) for item in value] if isinstance(value, tuple) else value


@given(extra=JSON)
def test_keys_of_a_later_release_are_passed_over(extra: Any) -> None:
    for record in (*RECORDS, REPORT):
        assert type(record).read(with_later(record, extra)) == record


@pytest.mark.parametrize("kind", [*KINDS.values(), TranslationReport])
@given(plain=JSON)
def test_anything_is_read_as_something(kind: type[JsonRecord], plain: Any) -> None:
    assert isinstance(kind.read(plain), kind)


def test_values_that_json_or_this_release_does_not_know_are_missing() -> None:
    plain = {"step": 3, "loss": "much", "nll": None, "lr": 0.5, "tokens": 1.5, "layers": [{"layer": 1}]}
    assert StepRecord.read(plain) == StepRecord(3, lr=0.5)
    line = to_json(StepRecord(3, loss=float("nan"), nll=float("inf")).to_plain(), inf_nan_mode="null")
    assert json.loads(line) == {"step": 3, "loss": None, "nll": None, "layers": []}
    assert StepRecord.read(json.loads(line)) == StepRecord(3)


def test_the_name_of_all_sources_is_the_one_that_specs_reserve() -> None:
    """Declared twice, since data must not import records, nor a client specs."""
    from moe.records.language import ALL
    from moe.spec.sequences import ALL as RESERVED

    assert ALL == RESERVED

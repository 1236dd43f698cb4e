"""Laws of a stream: its batches are those of a slow reference, for any ranks and from any position; faults of files
are refused with their place; and nothing of it is left behind."""

import hashlib
import json
import os
import resource
import signal
import tempfile
from collections import Counter
from pathlib import Path

import fsspec
import numpy as np
import psutil
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.data.locations import Location
from moe.data.sequences import prepare
from moe.data.sequences.formats import DocumentReader
from moe.data.sequences.model_tokenizer import SHARDS
from moe.data.sequences.stream.builder_process import BuilderProcess
from moe.data.sequences.stream.order import PieceOrder
from moe.data.sequences.stream.plan import StreamPlan
from moe.data.sequences.stream.sampler import StreamSampler
from moe.data.sequences.stream.shards import ShardList
from moe.data.sequences.stream.window_folder import WindowFolder
from tests.refusals import expect_problem
from tests.unit.documents import VOCAB_SIZE
from tests.unit.streams import LocalBuilder, plan_of, reference, sampler_of, stream_job, texts_of, write_shards


def write_sources(folder, shards_by_source, seed=0, weights=None):
    """(sources of a spec, texts of each source by shard); `shards_by_source`: documents of each shard."""
    sources, texts = [], []
    for index, sizes in enumerate(shards_by_source):
        name = f"s{index}"
        texts.append([texts_of(f"{name}-{shard}", size, seed) for shard, size in enumerate(sizes)])
        source = {"name": name, "paths": [write_shards(folder / "data", name, texts[-1])]}
        sources.append({**source, "weight": 1.0 if weights is None else weights[index]})
    return sources, texts


def assert_rows(actual, expected):
    """Rows of a sampler against those of the reference."""
    for part, array in enumerate(actual.rows):
        np.testing.assert_array_equal(array, [row[part] for row in expected])
    assert actual.num_targets == sum(label >= 0 for row in expected for label in row[2])
    assert actual.tokens_by_source.tolist() == np.sum([row[3] for row in expected], 0).tolist()


shards = st.lists(st.lists(st.integers(8, 40), min_size=1, max_size=5), min_size=1, max_size=3)


@given(shards, st.integers(1, 6), st.sampled_from([0, 2**31]), st.data())
def test_batches_are_those_of_the_reference_on_any_ranks_and_from_any_step(shards_by_source, partitions, seed, data):
    weights = [data.draw(st.sampled_from([0.5, 1.0, 3.0])) for _ in shards_by_source]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sources, texts = write_sources(folder, shards_by_source, seed, weights)
        plan = plan_of(stream_job(sources, rows=6, partitions=partitions, seed=seed))
        num_steps = 12
        expected = reference(plan, texts, num_steps)
        cuts = sorted({0, 6, *data.draw(st.lists(st.integers(0, 6), max_size=4))})
        for groups in map(range, cuts, cuts[1:]):
            sampler = sampler_of(plan, folder, groups)
            step = 0
            while step < num_steps:
                if data.draw(st.integers(0, 4)) == 0:  # killed, and resumed on the same groups
                    positions = json.loads(json.dumps(sampler.positions(step)))
                    sampler.close()
                    sampler = sampler_of(plan, folder, groups)
                    sampler.seek(step, {int(number): place for number, place in positions.items()})
                rows = sampler.batch(step)
                assert rows.first_row == groups.start
                assert_rows(rows, expected[step][groups.start : groups.stop])
                step += 1
            sampler.close()


def test_other_ranks_continue_from_merged_positions(tmp_path):
    sources, texts = write_sources(tmp_path, [[30] * 5, [20]])
    plan = plan_of(stream_job(sources, rows=6, partitions=4))
    expected = reference(plan, texts, 20)
    positions = {}
    for groups in (range(2), range(2, 6)):
        sampler = sampler_of(plan, tmp_path, groups)
        for step in range(9):
            sampler.batch(step)
        positions |= sampler.positions(7)  # two steps behind the batches that were made
        sampler.close()
    sampler = sampler_of(plan, tmp_path)
    sampler.seek(7, positions)
    for step in (7, 8, 9, 7, 8, 15):  # also backwards and over a gap
        assert_rows(sampler.batch(step), expected[step])
    sampler.seek(1000, positions)  # another job that starts from a checkpoint of this one
    assert_rows(sampler.batch(1000), expected[7])
    sampler.seek(1000, {})
    assert_rows(sampler.batch(1001), expected[1])
    sampler.close()
    assert not list((tmp_path / "windows").iterdir())


def test_each_pass_reads_every_piece_once_in_another_order():
    order = PieceOrder(7, 0, 10, 4)
    numbers = [order.piece(partition, number).shard for number in range(10) for partition in range(4)]
    passes = [numbers[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(numbers) == list(range(10)) for numbers in passes)
    assert len(set(map(tuple, passes))) == 4


def test_text_follows_weights(tmp_path):
    sources, _ = write_sources(tmp_path, [[60] * 4, [15] * 4], weights=[1.0, 3.0])
    plan = plan_of(stream_job(sources, rows=8, partitions=2))
    sampler = sampler_of(plan, tmp_path)
    tokens = sum(sampler.batch(step).tokens_by_source for step in range(80))
    sampler.close()
    assert tokens[1] / tokens[0] == pytest.approx(3 / 4, rel=0.15)


def refusal_of(plan, folder, num_steps, waits_s=()):
    """Run a stream until it is refused."""
    sampler = StreamSampler(plan, range(plan.num_groups), folder / "windows", LocalBuilder(plan, waits_s))
    try:
        for step in range(num_steps):
            sampler.batch(step)
    finally:
        sampler.close()


def test_changed_and_vanished_shards_are_named(tmp_path):
    sources, _ = write_sources(tmp_path, [[30] * 3])
    plan = plan_of(stream_job(sources, rows=4))
    path = tmp_path / "data" / "s0-001.jsonl.gz"
    content = path.read_bytes()
    path.write_bytes(content + content)
    with expect_problem("changed", "data.sources[0].paths[0]", str(path)):
        refusal_of(plan, tmp_path, 100)
    path.write_bytes(content)
    os.utime(path, ns=(0, 0))
    with expect_problem("changed", "data.sources[0].paths[0]", str(path)):
        refusal_of(plan, tmp_path, 100)
    path.unlink()
    with expect_problem("not_found", "data.sources[0].paths[0]", str(path)):
        refusal_of(plan, tmp_path, 100)


def test_shards_of_a_remote_store_are_read_and_compared(tmp_path):
    """In fsspec's memory, where a file that is written again has another version, although it has as many bytes. Two
    readers of one file there share its position, so there is one partition."""
    store = fsspec.filesystem("memory")
    texts = [texts_of(f"m{index}", 30) for index in range(3)]
    for index, shard_texts in enumerate(texts):
        store.pipe_file(
            f"/bucket/{index}.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in shard_texts).encode()
        )
    plan = plan_of(stream_job([{"paths": ["memory://bucket/*.jsonl"]}], rows=4, partitions=1))
    expected = reference(plan, [texts], 20)
    sampler = sampler_of(plan, tmp_path)
    for step in range(20):
        assert_rows(sampler.batch(step), expected[step])
    sampler.close()
    store.pipe_file("/bucket/1.jsonl", store.cat_file("/bucket/1.jsonl"))
    with expect_problem("changed", "data.sources[0].paths[0]", "memory://bucket/1.jsonl"):
        refusal_of(plan, tmp_path, 100)
    store.rm("/bucket", recursive=True)


def test_a_damaged_shard_is_refused_where_it_ends(tmp_path):
    sources, _ = write_sources(tmp_path, [[300] * 2])
    path = tmp_path / "data" / "s0-001.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-2000])
    plan = plan_of(stream_job(sources, rows=4))
    with expect_problem("unreadable", "data.sources[0].paths[0]") as problem:
        refusal_of(plan, tmp_path, 400, waits_s=(0.0, 0.0))
    assert str(problem.value.problems[0].value).startswith(f"{path}, line ")


def test_errors_of_reading_that_pass_do_not_change_the_batches(tmp_path, monkeypatch):
    """Every seventh opening fails, and every other reading of a file after 50 documents."""
    sources, texts = write_sources(tmp_path, [[120] * 3])
    plan = plan_of(stream_job(sources, rows=4))
    expected = reference(plan, texts, 60)
    raw, failures = Location.raw, iter([True, *[False] * 6] * 1000)
    texts_of_file, num_broken = DocumentReader.texts, Counter()

    def failing(location):
        if next(failures):
            raise ConnectionResetError("try again")
        return raw(location)

    def broken(reader, file, faults, limit_bytes=None):
        num_broken[file] += 1
        for number, text in enumerate(texts_of_file(reader, file, faults, limit_bytes)):
            if number == 50 and num_broken[file] % 2:
                raise OSError("connection lost")
            yield text

    monkeypatch.setattr(Location, "raw", failing)
    monkeypatch.setattr(DocumentReader, "texts", broken)
    sampler = StreamSampler(plan, range(4), tmp_path / "windows", LocalBuilder(plan, (0.0,) * 3))
    for step in range(60):
        assert_rows(sampler.batch(step), expected[step])
    sampler.close()


def test_text_files_are_read_again_instead_of_skipped(tmp_path, monkeypatch):
    texts = [[text_of] for text_of in texts_of("t", 12) if text_of]
    for index, (content,) in enumerate(texts):
        (tmp_path / f"{index:02}.txt").write_text(content)
    spec = stream_job([{"paths": [f"{tmp_path}/*.txt"]}], rows=4)
    data = {**spec.data.model_dump(mode="json"), "on_bad": "skip", "max_bad_share": 0.9}
    plan = plan_of(type(spec).parse({**spec.model_dump(mode="json"), "data": data}))
    expected = reference(plan, [texts], 30)
    opening, failures = Location.open, iter([True, False] * 1000)

    def failing(location):
        if next(failures):
            raise OSError("stale handle")
        return opening(location)

    monkeypatch.setattr(Location, "open", failing)
    sampler = StreamSampler(plan, range(4), tmp_path / "windows", LocalBuilder(plan, (0.0,)))
    for step in range(30):
        assert_rows(sampler.batch(step), expected[step])
    sampler.close()


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_unusable_records_are_skipped_up_to_a_share(tmp_path, share):
    lines = [json.dumps({"text": f"document {index} and more"}) for index in range(2000)]
    lines = [line if index % 4 else "{broken" for index, line in enumerate(lines)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    spec = stream_job([{"paths": [str(path)]}], rows=4, max_tokens=64)
    data = {**spec.data.model_dump(mode="json"), "on_bad": "skip", "max_bad_share": share}
    plan = plan_of(type(spec).parse({**spec.model_dump(mode="json"), "data": data}))
    if share > 0.25:
        refusal_of(plan, tmp_path, 100)
        return
    with expect_problem("bad_records", "data.max_bad_share", share):
        refusal_of(plan, tmp_path, 100)


def test_an_unusable_record_stops_with_its_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([*(json.dumps({"text": "some text"}) for _ in range(99)), "{broken"]))
    plan = plan_of(stream_job([{"paths": [str(path)]}], rows=4, partitions=1))
    with expect_problem("invalid_syntax", "data.sources[0].paths[0]", f"{path}, line 100"):
        refusal_of(plan, tmp_path, 100)


def test_a_source_without_text_for_training_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": " "}) * 1)
    plan = plan_of(stream_job([{"paths": [str(path)]}], rows=4))
    with expect_problem("empty", "data.sources[0].paths", str(path)):
        refusal_of(plan, tmp_path, 1)


@pytest.fixture
def prepared_stream(tmp_path):
    """(plan, prepared data) of a small stream of Parquet files and compressed lines."""
    for index in range(3):
        texts = texts_of(f"p{index}", 40)
        pyarrow.parquet.write_table(pyarrow.table({"content": texts}), tmp_path / f"{index}.parquet", row_group_size=7)
    sources, _ = write_sources(tmp_path, [[40] * 2])
    sources += [{"name": "tables", "paths": [f"{tmp_path}/*.parquet"], "column": "content"}]
    spec = stream_job(sources, rows=4, partitions=2)
    data = prepare(spec.data, VOCAB_SIZE, tmp_path / "cache")
    return StreamPlan.of_job(spec, data.shards), data


def test_the_background_process_writes_the_same_windows_and_ends_with_its_parent(prepared_stream, tmp_path):
    plan, data = prepared_stream
    local = StreamSampler(plan, range(4), tmp_path / "windows", LocalBuilder(plan, tokenizer=data.tokenizer))
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        builder = BuilderProcess(plan, data.folder, None, 1)
        sampler = StreamSampler(plan, range(4), tmp_path / "windows", builder)
        digests = [hashlib.sha256(sampler.batch(step).rows.labels.tobytes()).hexdigest() for step in range(12)]
        os.write(writer, json.dumps([builder.pid, digests]).encode())
        signal.pause()
    builder_pid, digests = json.loads(os.read(reader, 10_000))
    builder = psutil.Process(builder_pid)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    builder.wait(60)
    assert digests == [hashlib.sha256(local.batch(step).rows.labels.tobytes()).hexdigest() for step in range(12)]
    local.close()
    WindowFolder(tmp_path / "windows").remove()
    assert not list((tmp_path / "windows").iterdir())


def test_a_builder_that_dies_is_reported(prepared_stream):
    plan, data = prepared_stream
    builder = BuilderProcess(plan, data.folder, None, 1)
    os.kill(builder.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="the stream ended"):
        builder.wait(0)
    builder.close()


def test_a_full_disk_is_reported(prepared_stream, tmp_path):
    """As a bound on the size of files, which writing meets in the same way."""
    plan, data = prepared_stream
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, before[1]))
    try:
        builder = BuilderProcess(plan, data.folder, None, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    sampler = StreamSampler(plan, range(4), tmp_path / "windows", builder)
    try:
        with expect_problem("not_writable", "data.stream", str(tmp_path / "windows")):
            sampler.batch(0)
    finally:
        sampler.close()
    assert not list((tmp_path / "windows").iterdir())


def test_a_resumed_stream_keeps_its_files_when_others_appear(prepared_stream, tmp_path):
    plan, data = prepared_stream
    write_shards(tmp_path / "data", "s0-more", [texts_of("new", 10)])
    recorded = data.carried_files()[SHARDS]
    again = prepare(plan.data, VOCAB_SIZE, tmp_path / "cache", shards=recorded)
    assert (again.key, again.shards) == (data.key, data.shards)
    assert prepare(plan.data, VOCAB_SIZE, tmp_path / "cache").key != data.key
    (tmp_path / "1.parquet").unlink()
    with expect_problem("not_found", "data.sources[1].paths[0]", f"{tmp_path}/1.parquet"):
        prepare(plan.data, VOCAB_SIZE, tmp_path / "cache", shards=recorded)


def test_a_recorded_list_finds_a_file_whose_name_is_a_pattern(tmp_path):
    for name in ("a*.jsonl", "ab.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    shards = plan_of(stream_job([{"paths": [f"{tmp_path}/*.jsonl"]}], rows=4, partitions=1)).shards
    assert ShardList.from_bytes(shards.to_bytes(), [str(tmp_path)]) == shards


def test_a_recorded_list_asks_a_remote_store_for_nothing(monkeypatch):
    """Each worker reads it, and each file would be a request."""
    store = fsspec.filesystem("memory")
    store.pipe("/listed/1.jsonl", json.dumps({"text": "a line"}).encode() + b"\n")
    shards = plan_of(stream_job([{"paths": ["memory://listed/*.jsonl"]}], rows=4, partitions=1)).shards
    for name in ("info", "ls", "isfile", "exists", "open"):
        monkeypatch.setattr(store, name, None)
    assert ShardList.from_bytes(shards.to_bytes(), ["memory://listed"]) == shards
    with expect_problem("not_allowed", "data.sources[0].paths[0]", "memory://listed/1.jsonl"):
        ShardList.from_bytes(shards.to_bytes(), ["memory://other"])


def test_evaluation_uses_documents_that_no_window_has(prepared_stream, tmp_path):
    plan, data = prepared_stream
    sampler = StreamSampler(plan, range(4), tmp_path / "windows", LocalBuilder(plan, tokenizer=data.tokenizer))
    trained = set()
    for step in range(60):
        tokens, documents, _ = sampler.batch(step).rows
        trained |= {
            data.tokenizer.decode(row[numbers == number]).split()[0]
            for row, numbers in zip(tokens, documents, strict=True)
            for number in set(numbers.tolist()) - {-1}
            if row[numbers == number][0] == data.tokenizer.bos_id
        }
    sampler.close()
    held_out = {text.split()[0].decode() for store in data.held_out.values() for text in store.texts()}
    assert len(trained) > 100
    assert len(held_out) > 5
    assert not trained & held_out


def test_windows_of_killed_processes_are_removed(tmp_path):
    pid = os.fork()
    if pid == 0:
        folder = WindowFolder(tmp_path)
        folder.new().mkdir()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert len(list(tmp_path.iterdir())) == 2
    own_folder = WindowFolder(tmp_path)
    own_folder.new().mkdir()
    second_folder = WindowFolder(tmp_path)  # does not remove that of a living process
    assert {path.suffix for path in tmp_path.iterdir()} == {"", ".lock"}
    assert len(list(tmp_path.iterdir())) == 4
    second_folder.remove()
    own_folder.remove()
    assert not list(tmp_path.iterdir())

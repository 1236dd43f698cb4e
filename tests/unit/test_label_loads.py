"""Expert loads by label of held-out tokens, against counting one row at a time."""

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from moe.data.tokenizer import BOS, Tokenizer
from moe.layers.moe import MoELayer
from moe.parallel import Layout
from moe.records import LabelLoads, StepRecord
from moe.routing import TokenContext, record_routing
from moe.spec import MoESpec
from moe.tasks.batch_context import BatchContext
from moe.tasks.build import build_task
from moe.tasks.label_loads import MAX_LABELS, LabelLoadCounter, load_by_label
from moe.tasks.language.batches import SequencesBatch
from tests.parity.test_chat_mixture_runs import mixture_spec, write_sources
from tests.unit.language_runs import language_job
from tests.unit.train_runs import corpus, job

LAYOUT = Layout.single()
NUM_SEQUENCES = 7
Loads = dict[tuple[str, int, int], int]
"""Choices by label, layer and expert."""


def as_counts(loads: LabelLoads) -> Loads:
    return {
        (label, record.layer, expert): load
        for record in loads.layers
        for label, load_E in zip(loads.labels, record.load, strict=True)
        for expert, load in enumerate(load_E)
        if load
    }


def count_row(counts: Counter[Any], label: str, recording: Any) -> None:
    for layer, chosen in recording.items():
        counts.update((label, layer, expert) for expert in chosen.flatten().tolist() if expert >= 0)


@torch.no_grad()
def test_loads_by_language_equal_counting_pair_by_pair(tmp_path: Path) -> None:
    moe = {"router": "softmax_topk", "top_k": 2, "num_experts": 4, "hidden_dim": 24, "group_tokens": 64}
    spec = job(corpus(tmp_path), model={"moe": moe})
    task = build_task(spec)
    data, model = task.prepare(tmp_path / "cache"), task.build_model(LAYOUT)
    loads = task.measure_held_out(model, LAYOUT, data).label_loads
    counts = Counter[Any]()
    for store in data.held_out.values():
        assert store.num_pairs <= spec.train.evaluation.max_pairs_along_the_way, "all pairs are in the sample"
        for row in range(store.num_pairs):
            source, target = (torch.tensor(side(row).tolist())[None] for side in (store.source, store.target))
            target_in = functional.pad(target[:, :-1], (1, 0), value=BOS)
            for stack in ("encoder", "decoder"):  # whose positions have the same ids
                layers = {layer.layer for layer in getattr(model, stack).modules() if isinstance(layer, MoELayer)}
                with record_routing(getattr(model, stack)) as recording:
                    model(source, target_in, BatchContext(training=False))
                assert set(recording) == layers
                count_row(counts, store.text(row)[2], recording)
    assert loads is not None
    assert loads.kind == "language"
    assert as_counts(loads) == counts
    sizes = {language: facts["train"] for language, facts in data.stats["languages"].items()}
    assert [sizes[language] for language in loads.labels] == sorted(sizes.values(), reverse=True)
    record = StepRecord(step=1, label_loads=loads)
    assert StepRecord.read(record.to_plain()) == record


def language_loads(tmp_path: Path, num_sources: int) -> tuple[LabelLoads | None, Loads]:
    """Loads by source of a held-out evaluation, and the same counted row by row."""
    sources = []
    for number in range(num_sources):
        folder = tmp_path / f"source-{number}"
        folder.mkdir()
        for index in range(60):
            text = " ".join(f"{'abc'[number]}{(7 * index + place * place) % 23}" for place in range(30))
            (folder / f"{index}.txt").write_text(text)
        sources.append({"name": f"source-{number}", "paths": [f"{folder}/*.txt"], "format": "text"})
    data_part = {"corpus": "documents", "max_tokens": 64, "held_out": 0.3, "sources": sources}
    task = build_task(language_job(data_part, train={"evaluation": {"max_sequences_along_the_way": NUM_SEQUENCES}}))
    data, model = task.prepare(tmp_path / "cache"), task.build_model(LAYOUT)
    counts = Counter[Any]()
    for name, store in data.held_out.items():
        number = min(NUM_SEQUENCES, store.num_rows)
        for row in range(number):
            batch = SequencesBatch.from_part(
                store.rows([row * store.num_rows // number]), BatchContext(training=False), LAYOUT
            )
            with record_routing(model) as recording:
                model.hidden_states(batch.tokens, batch.context)
            count_row(counts, name, recording)
    return task.measure_held_out(model, LAYOUT, data).label_loads, dict(counts)


@torch.no_grad()
def test_loads_by_source_equal_counting_row_by_row(tmp_path: Path) -> None:
    loads, counts = language_loads(tmp_path, 3)
    assert loads is not None
    assert (loads.kind, loads.labels) == ("source", ("source-0", "source-1", "source-2"))
    assert as_counts(loads) == counts


def roles_by_headers(tokens: list[int], tokenizer: Tokenizer) -> list[str]:
    """Role of each token of a conversation in the template of `write_sources`. A system message of the date alone is
    the template's."""
    begin, end = (tokenizer.encode_verbatim([f"<|{name}_header_id|>"])[0].ids[0] for name in ("start", "end"))
    starts = [place for place, token in enumerate(tokens) if token == begin]
    roles = list[str]()
    for start, stop in pairwise([*starts, len(tokens)]):
        message = tokens[start:stop]
        role = tokenizer.decode(message[: message.index(end)])
        if role == "system" and re.search(r"Today: \d+ \w+ \d+$", tokenizer.decode(message).strip()):
            role = "no role"
        roles += [role] * (stop - len(roles))
    return roles


@torch.no_grad()
def test_loads_by_role_equal_counting_position_by_position(tmp_path: Path) -> None:
    spec = mixture_spec(tmp_path, write_sources(tmp_path / "data", "chat"), "chat", "by_source", 1, {})
    task = build_task(spec)
    data, model = task.prepare(tmp_path / "cache"), task.build_model(LAYOUT)
    counts = Counter[Any]()
    for name, store in data.held_out.items():
        assert store.num_rows <= spec.train.evaluation.max_sequences_along_the_way, "all rows are in the sample"
        for row in range(store.num_rows):
            batch = SequencesBatch.from_part(store.rows([row]), BatchContext(training=False), LAYOUT)
            with record_routing(model) as recording:
                model.hidden_states(batch.tokens, batch.context)
            if name == "web":
                count_row(counts, name, recording)
                continue
            documents = store.rows([row]).documents[0]
            for document in range(documents.max() + 1):
                (places,) = (documents == document).nonzero()
                roles = roles_by_headers(batch.tokens[0, places].tolist(), data.tokenizer)
                for place, role in zip(places, roles, strict=True):
                    rows = {layer: chosen[place : place + 1] for layer, chosen in recording.items()}
                    count_row(counts, f"{name}: {role}", rows)
    loads = task.measure_held_out(model, LAYOUT, data).label_loads
    assert loads is not None
    assert loads.kind == "role"
    roles = ("system", "user", "assistant", "no role")
    assert loads.labels == (*(f"{source}: {role}" for source in ("big", "small") for role in roles), "web")
    assert as_counts(loads) == counts


@torch.no_grad()
def test_one_source_has_no_loads_by_label(tmp_path: Path) -> None:
    loads, counts = language_loads(tmp_path, 1)
    assert loads is None
    assert counts


def layer_of(**fields: Any) -> MoELayer:
    return MoELayer(MoESpec(model_dim=6, num_experts=4, hidden_dim=8, group_tokens=6, **fields), layer=3)


@pytest.mark.parametrize("router", ["softmax_topk", "gshard_top2", "expert_choice"])
@torch.no_grad()
def test_choices_that_are_accepted_count(router: str) -> None:
    """Not those of padding, rejected or dropped ones, or those of rows without a label."""
    torch.manual_seed(0)
    layer, label_B = layer_of(router=router, capacity_factor=0.7), torch.tensor([1, 0, -1, 2, 1])
    padding = torch.rand(5, 6) < 0.3
    _, routing = layer(torch.randn(5, 6, 6), TokenContext(padding=padding))
    expected = torch.zeros(4, 4, dtype=torch.int64)
    for token, expert, is_kept in zip(*(part.tolist() for part in routing.choices.pairs), strict=True):
        label = int(label_B[token // 6])
        if is_kept and label >= 0:
            expected[label, expert] += 1
    assert torch.equal(load_by_label(routing.choices, label_B, 4), expected)
    assert 0 < int(expected.sum()) < int(routing.load.sum()) < 60


@torch.no_grad()
def test_the_first_pass_of_a_layer_counts() -> None:
    torch.manual_seed(0)
    layer, x, context = layer_of(), torch.randn(3, 6, 6), TokenContext(training=False)
    loads_of_rows = [tuple(layer(row[None], context)[1].load.tolist()) for row in x]
    counter = LabelLoadCounter(layer, LAYOUT, "source", [f"label {number}" for number in range(100)])
    layer(x, context)
    with counter.counting(torch.tensor([MAX_LABELS, MAX_LABELS - 1, -1])):
        layer(x, context)
        layer(x, context)
    assert counter.sum_over_ranks() is None, "one of these labels is counted"
    with counter.counting(torch.tensor([-1, -1, 3])):
        layer(x, context)
    loads = counter.sum_over_ranks()
    assert loads is not None
    assert loads.labels == ("label 3", f"label {MAX_LABELS - 1}")
    assert [(record.layer, record.load) for record in loads.layers] == [(3, (loads_of_rows[2], loads_of_rows[1]))]


def test_a_record_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe.tasks.label_loads.MAX_COUNTS", 11)
    layer = layer_of()
    with torch.no_grad():
        counter = LabelLoadCounter(layer, LAYOUT, "language", ["a", "b", "c"])
        with counter.counting(torch.tensor([0, 1, 2])):
            layer(torch.randn(3, 6, 6), TokenContext(training=False))
    loads = counter.sum_over_ranks()
    assert loads is not None
    assert loads.labels == ("a", "b")

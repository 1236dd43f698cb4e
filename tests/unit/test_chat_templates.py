"""Chat templates: what is written, and which tokens of it are learned."""

import json
import pickle
import random
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from transformers import AutoTokenizer

from moe.data.conversations.conversation import RenderedText, Rendering, UnreadableRecord
from moe.data.conversations.records import conversation_of, pair_of
from moe.data.conversations.template import ChatTemplate
from moe.data.limited_process import NoAnswer, answer_of
from moe.data.sequences.corpus import SourceDocument
from moe.data.sequences.encoding import encode_documents
from moe.data.tokenizer import Tokenizer
from tests.refusals import refused
from tests.unit import chats
from tests.unit.chats import ANSWER, DATE, OTHER, STRUCTURES, USER, Structure


def template_of(source: str, **variables: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>", **variables}, DATE.isoformat())


def rows_of(found: Iterable[Rendering | UnreadableRecord]) -> list[RenderedText]:
    """The rows of conversations that are all written."""
    rows = []
    for each in found:
        assert isinstance(each, Rendering), each
        rows += each.rows
    return rows


def written(source: str, *rows: dict[str, Any]) -> list[RenderedText]:
    return rows_of(template_of(source).render_rows([conversation_of(row) for row in rows]))


def refusal(source: str, row: dict[str, Any]) -> UnreadableRecord:
    (found,) = template_of(source).render_rows([conversation_of(row)])
    assert isinstance(found, UnreadableRecord), found
    return found


@pytest.mark.parametrize("name", STRUCTURES)
def test_what_is_learned_is_what_a_plain_reading_says_token_by_token(name: str):
    structure, rng = STRUCTURES[name], random.Random(name)
    rows = [chats.conversation(rng, structure) for _ in range(60)]
    tokenizer = Tokenizer.of_model(chats.tokenizer_json(), bos_id=None, eos_id=1)
    plain = tokenizers.Tokenizer.from_str(chats.tokenizer_json())
    texts = written(structure.source, *rows)
    documents = [SourceDocument("x", each.text, False, each.spans) for each in texts]
    for row, found in zip(rows, encode_documents(tokenizer, documents), strict=True):
        pieces = structure.read(row["messages"], row.get("tools"))
        assert found.document.text == "".join(text for text, _ in pieces)
        is_learned = [learned for text, learned in pieces for _ in text]
        reference = plain.encode(found.document.text, add_special_tokens=False)
        assert found.ids.tolist() == reference.ids
        assert found.label_mask is not None
        assert found.label_mask.tolist() == [any(is_learned[a:b]) for a, b in reference.offsets]
        assert found.text.decode() == "".join(text for text, learned in pieces if learned)


@pytest.mark.parametrize("name", STRUCTURES)
def test_ids_and_marked_masks_are_those_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    structure, rng = STRUCTURES[name], random.Random(f"theirs {name}")
    for path, content in chats.tokenizer_files(structure.source).items():
        (tmp_path / path).write_bytes(content)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    # Theirs knows no day but today's, and some templates ask for it.
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", _Fixed)
    rows = [chats.conversation(rng, structure) for _ in range(25)]
    tokenizer = Tokenizer.of_model(chats.tokenizer_json(), bos_id=None, eos_id=1)
    documents = [SourceDocument("x", each.text, False, each.spans) for each in written(structure.source, *rows)]
    for row, found in zip(rows, encode_documents(tokenizer, documents), strict=True):
        told = theirs.apply_chat_template(
            row["messages"], tools=row.get("tools"), return_dict=True,
            return_assistant_tokens_mask="marked" in name,
        )  # fmt: skip
        assert told["input_ids"] == found.ids.tolist()
        if "marked" in name:
            assert found.label_mask is not None
            assert told["assistant_masks"] == found.label_mask.astype(int).tolist()


class _Fixed(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> "_Fixed":
        return cls(DATE.year, DATE.month, DATE.day, tzinfo=tz)


CHATML: Structure = STRUCTURES["chatml"]
ASKED = [{"role": "user", "content": "hi"}]
ROW = {"messages": [*ASKED, {"role": "assistant", "content": "ho"}]}


def test_an_answer_may_be_left_out_by_its_weight():
    row = {"messages": [*ASKED, {"role": "assistant", "content": "no", "weight": 0}, *ASKED,
                        {"role": "assistant", "content": "yes"}]}  # fmt: skip
    for name in ("chatml", "chatml, marked"):
        (found,) = written(STRUCTURES[name].source, row)
        assert [found.text[a:b] for a, b in found.spans] == ["yes<|im_end|>\n"], name


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("{{ raise_exception('not so') }}", "refuses it: not so"),
        ("{{ 'a' * 3000000000 }}", "exceeds a template's memory limit"),
        ("{% for i in range(99999) %}{% for j in "
         "range(99999) %}{% endfor %}{% endfor %}", "exceeds its time limit of 0.5 s"),
        ("{{ messages.append(1) }}", "fails: access to attribute 'append'"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "fails: access to attribute '__class__'"),
        ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "fails: access to attribute '__init__'"),
        ("{% include '/etc/passwd' %}", "fails: no loader"),
        ("{{ messages[7].content }}", "fails: "),
        ("{{ messages[0].content }}", "renders nothing for a conversation's answers"),
        ("{{ add_generation_prompt }}{% for m in messages %}{{ m.content }}{% endfor %}"
         "{{ '!' if add_generation_prompt }}",
         "renders different text before an answer than its generation prompt"),
        ("{% generation %}{% endgeneration %}", "marks nothing"),
        ("{% for m in messages %}{{ m.content * 9000000 }}{% endfor %}", "renders more than 16777216 characters"),
    ],
)  # fmt: skip
def test_a_template_that_fails_is_refused_with_what_it_did(source: str, rule: str, monkeypatch: pytest.MonkeyPatch):
    # The same limit, reached sooner.
    monkeypatch.setattr("moe.data.conversations.template.SECONDS_EACH", 0.5)
    long = {"messages": [*ROW["messages"], *ROW["messages"]]}
    assert rule in refusal(source, long).rule


def test_a_template_that_is_none_is_refused():
    with refused("invalid_syntax", "model.from/chat_template", None):
        list(template_of("{{ messages }}\n{% if %}").render_rows([conversation_of(ROW)]))


def test_a_template_may_end_the_process_that_reads_it(monkeypatch: pytest.MonkeyPatch):
    # The same limit, reached sooner.
    monkeypatch.setattr("moe.data.conversations.template.TIMEOUT_S", 3.0)
    # One operation of integers that no signal interrupts.
    found = refusal("{{ (10 ** 9) ** (10 ** 9) }}", ROW)
    assert found.rule == "exceeds its time limit of 3 s, rendering this conversation"


def test_a_template_that_never_ends_is_given_up_in_bounded_time(monkeypatch: pytest.MonkeyPatch):
    limits = list[float]()

    def noted(module: str, given: bytes, *, timeout_s: float, memory_bytes: int) -> bytes:
        limits.append(timeout_s)
        return answer_of(module, given, timeout_s=timeout_s, memory_bytes=memory_bytes)

    # The same limit, reached sooner: by its own 120 s the test would wait four minutes.
    monkeypatch.setattr("moe.data.conversations.template.TIMEOUT_S", 2.0)
    # Starts the real process, and notes how long it may take: the sum of these is what is promised.
    monkeypatch.setattr("moe.data.conversations.template.answer_of", noted)
    (found,) = template_of("{{ (10 ** 9) ** (10 ** 9) }}").render_rows([conversation_of(ROW)] * 500)
    assert isinstance(found, UnreadableRecord)
    assert "rendering this conversation or one of" in found.rule
    assert len(limits) > 1
    assert sum(limits) <= 2 * 2.0


def test_a_date_that_nobody_gave_is_asked_for():
    template = ChatTemplate({"default": STRUCTURES["llama"].source}, {"bos_token": "<s>"})
    (found,) = template.render_rows([conversation_of(ROW)])
    assert isinstance(found, UnreadableRecord)
    assert found.rule == "uses the date, but data.date is not set"


def test_templates_are_found_where_tokenizers_keep_them():
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    for files, sources in (
        (chats.tokenizer_files("x"), {"default": "x"}),
        (chats.tokenizer_files("x", in_config=True), {"default": "x"}),
        ({"tokenizer_config.json": json.dumps({"chat_template": named}).encode()}, {"default": "a", "tool_use": "b"}),
        ({"chat_template.json": b'{"chat_template": "c"}'}, {"default": "c"}),
    ):
        assert ChatTemplate.of_files(files).sources == sources
    assert ChatTemplate.of_files(chats.tokenizer_files("x")).variables == {
        "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}  # fmt: skip
    for files in ({}, {"tokenizer_config.json": b"{}"}, {"tokenizer_config.json": b"[1"}):
        with refused("missing", "model.from", None):
            ChatTemplate.of_files(files)


def test_conversations_with_tools_are_written_by_their_own_template():
    plain, tools = STRUCTURES["llama"].source, CHATML.source
    template = ChatTemplate({"default": plain, "tool_use": tools}, {"bos_token": "<s>"}, DATE.isoformat())
    rows = [ROW, {**ROW, "tools": [chats.WEATHER]}, ROW]
    found = template.render_rows([conversation_of(row) for row in rows])
    assert ["<|im_start|>" in each.text for each in rows_of(found)] == [False, True, False]


def test_only_what_follows_what_both_answer_to_is_learned_of_a_pair():
    early = [USER, {"role": "assistant", "content": "early"}, {"role": "user", "content": "more"}]
    for name in ("chatml", "chatml, marked"):
        for row in (
            {"chosen": [*early, ANSWER], "rejected": [*early, OTHER]},
            {"prompt": early, "chosen": [ANSWER], "rejected": [OTHER]},
        ):
            found = rows_of(template_of(STRUCTURES[name].source).render_rows(pair_of(row)))
            said = [[each.text[a:b] for a, b in each.spans] for each in found]
            assert said == [["a<|im_end|>\n"], ["b<|im_end|>\n"]], name


def test_an_id_is_learned_where_it_has_a_character_of_a_span():
    from moe.data.sequences.encoding import _overlaps

    rng = np.random.default_rng(5)
    for _ in range(200):
        ends = np.sort(rng.integers(0, 30, 2 * rng.integers(1, 5)))
        spans = [(int(a), int(b)) for a, b in ends.reshape(-1, 2) if a < b]
        begins = rng.integers(0, 30, 12)
        offsets = np.stack([begins, begins + rng.integers(0, 6, 12)], 1)
        slow = [any(a <= at < b for a, b in spans for at in range(*pair)) for pair in offsets.tolist()]
        if spans:
            assert _overlaps(offsets, spans).tolist() == slow


def test_spaces_are_learned_also_where_a_tokenizer_trims_offsets():
    told = json.loads(chats.tokenizer_json())
    processor = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    trimming = Tokenizer.of_model(json.dumps({**told, "post_processor": processor}), bos_id=None, eos_id=1)
    plain = Tokenizer.of_model(chats.tokenizer_json(), bos_id=None, eos_id=1)
    (text,) = written(CHATML.source, {"prompt": "q", "completion": "if x:\n        return   1"})
    for one, other in zip(
        *(encode_documents(each, [SourceDocument("x", text.text, False, text.spans)]) for each in (trimming, plain)),
        strict=True,
    ):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.label_mask is not None
        assert other.label_mask is not None
        assert one.label_mask.tolist() == other.label_mask.tolist()
    assert trimming.encode("x  y") == plain.encode("x  y")


def test_conversations_of_which_one_ends_the_process_are_told_apart(monkeypatch: pytest.MonkeyPatch):
    # What ends a process by itself takes long, or memory that a busy machine may not have.
    def ending(module: str, given: bytes, **limits: float) -> bytes:
        if b'"bad"' in given:
            raise NoAnswer("crashes its reader")
        return answer_of(module, given, **limits)  # type: ignore[arg-type]

    monkeypatch.setattr("moe.data.conversations.template.answer_of", ending)
    source = CHATML.source
    rows = [{"prompt": said, "completion": "a"} for said in ("x", "y", "bad", "z")]
    found = list(template_of(source).render_rows([conversation_of(row) for row in rows]))
    assert [isinstance(each, Rendering) for each in found] == [True, True, False]


def test_answers_that_are_not_learned_may_be_marked_as_nothing():
    marks = "{% generation %}{{ m.content }}{% endgeneration %}{{ m.tool_calls | tojson if m.tool_calls }}"
    source = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}" + marks + "{% else %}{{ m.content }}"
    source += "{% endif %}{% endfor %}"
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]}
    prompt = [USER, call, {"role": "tool", "content": "2"}]
    only_last = source.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
    for each in (source, only_last):
        found = template_of(each).render_rows(pair_of({"prompt": prompt, "chosen": "a", "rejected": "b"}))
        assert [[one.text[a:b] for a, b in one.spans] for one in rows_of(found)] == [["a"], ["b"]]


def test_a_refusal_pickles():
    again = pickle.loads(pickle.dumps(UnreadableRecord("rule", "remedy")))
    assert (again.rule, again.remedy) == ("rule", "remedy")

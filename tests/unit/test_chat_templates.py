"""Chat templates: what is rendered, which of its tokens are learned, and what a template may not do."""

import json
import pickle
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import AutoTokenizer

from moe.data.conversations.conversation import RenderedText, Rendering, UnreadableRecord
from moe.data.conversations.records import conversation_of, pair_of
from moe.data.conversations.template import ChatTemplate
from moe.data.limited_process import LimitedProcessError, run_limited
from moe.data.sequences.corpus import SourceDocument
from moe.data.sequences.encoding import encode_documents
from moe.data.tokenizer import Tokenizer
from tests.refusals import expect_problem
from tests.unit import chats
from tests.unit.chats import ANSWER, DATE, OTHER, STRUCTURES, USER, FixedDay

CHATML, MARKED = STRUCTURES["chatml"].source, STRUCTURES["chatml, marked"].source
ROW = {"messages": [USER, ANSWER]}
ENDLESS = "{{ (10 ** 9) ** (10 ** 9) }}"
"""One operation of integers, which no signal interrupts."""


def template_of(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"}, DATE.isoformat())


def rows_of(renderings: Iterable[Rendering | UnreadableRecord]) -> list[RenderedText]:
    rows: list[RenderedText] = []
    for rendering in renderings:
        assert isinstance(rendering, Rendering), rendering
        rows += rendering.rows
    return rows


def render(source: str, *rows: dict[str, Any]) -> list[RenderedText]:
    return rows_of(template_of(source).render_rows([conversation_of(row) for row in rows]))


def learned_texts(rows: Iterable[RenderedText]) -> list[list[str]]:
    return [[row.text[begin:end] for begin, end in row.spans] for row in rows]


def refusal(source: str, row: dict[str, Any], times: int = 1) -> UnreadableRecord:
    (outcome,) = template_of(source).render_rows([conversation_of(row)] * times)
    assert isinstance(outcome, UnreadableRecord), outcome
    return outcome


def tokenizer_of(json_text: str) -> Tokenizer:
    return Tokenizer.of_model(json_text, bos_id=None, eos_id=1)


def encode(tokenizer: Tokenizer, rows: Iterable[RenderedText]) -> Iterable[Any]:
    return encode_documents(tokenizer, [SourceDocument("x", row.text, False, row.spans) for row in rows])


@pytest.mark.parametrize("name", STRUCTURES)
def test_ids_and_learned_tokens_are_those_of_a_plain_reading_and_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    structure, rng = STRUCTURES[name], random.Random(name)
    for path, content in chats.tokenizer_files(structure.source).items():
        (tmp_path / path).write_bytes(content)
    of_transformers = AutoTokenizer.from_pretrained(tmp_path)
    # transformers renders today's date only.
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", FixedDay)
    plain = tokenizers.Tokenizer.from_str(chats.tokenizer_json())
    rows = [chats.conversation(rng, structure) for _ in range(60)]
    documents = encode(tokenizer_of(chats.tokenizer_json()), render(structure.source, *rows))
    for row, document in zip(rows, documents, strict=True):
        pieces = structure.read(row["messages"], row.get("tools"))
        assert document.document.text == "".join(text for text, _ in pieces)
        assert document.text.decode() == "".join(text for text, is_learned in pieces if is_learned)
        is_learned = [piece_is_learned for text, piece_is_learned in pieces for _ in text]
        reference = plain.encode(document.document.text, add_special_tokens=False)
        assert document.ids.tolist() == reference.ids
        assert document.label_mask.tolist() == [any(is_learned[begin:end]) for begin, end in reference.offsets]
        expected = of_transformers.apply_chat_template(
            row["messages"], tools=row.get("tools"), return_dict=True, return_assistant_tokens_mask="marked" in name
        )
        assert document.ids.tolist() == expected["input_ids"]
        if "marked" in name:
            assert document.label_mask.astype(int).tolist() == expected["assistant_masks"]


@pytest.mark.parametrize("source", [CHATML, MARKED], ids=["growth", "marks"])
def test_answers_of_weight_0_and_earlier_answers_of_a_pair_are_not_learned(source: str):
    row = {"messages": [USER, {**ANSWER, "weight": 0}, USER, OTHER]}
    assert learned_texts(render(source, row)) == [["b<|im_end|>\n"]]
    early = [USER, {"role": "assistant", "content": "early"}, {"role": "user", "content": "more"}]
    for pair in (
        {"chosen": [*early, ANSWER], "rejected": [*early, OTHER]},
        {"prompt": early, "chosen": [ANSWER], "rejected": [OTHER]},
    ):
        rows = rows_of(template_of(source).render_rows(pair_of(pair)))
        assert learned_texts(rows) == [["a<|im_end|>\n"], ["b<|im_end|>\n"]]


@pytest.mark.parametrize("condition", ["m.role == 'assistant'", "m.role == 'assistant' and loop.last"])
def test_marks_of_earlier_answers_may_be_empty_or_missing(condition: str):
    source = (
        "{% for m in messages %}<{{ m.role }}>{% if CONDITION %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{{ m.tool_calls | tojson if m.tool_calls }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ).replace("CONDITION", condition)
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]}
    pair = pair_of({"prompt": [USER, call, {"role": "tool", "content": "2"}], "chosen": "a", "rejected": "b"})
    assert learned_texts(rows_of(template_of(source).render_rows(pair))) == [["a"], ["b"]]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("{{ raise_exception('not so') }}", "refuses it: not so"),
        ("{{ 'a' * 3000000000 }}", "exceeds a template's memory limit"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "exceeds its time limit"),
        ("{{ messages.append(1) }}", "fails: access to attribute 'append'"),
        ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "fails: access to attribute '__init__'"),
        ("{% include '/etc/passwd' %}", "fails: no loader"),
        ("{{ messages[7].content }}", "fails: "),
        ("{{ messages[0].content }}", "renders nothing for a conversation's answers"),
        ("{{ add_generation_prompt }}{% for m in messages %}{{ m.content }}{% endfor %}{{ '!' if add_generation_prompt "
         "}}",
         "renders different text before an answer than its generation prompt"),
        ("{% generation %}{% endgeneration %}", "marks nothing"),
        ("{% for m in messages %}{{ m.content * 9000000 }}{% endfor %}", "renders more than 16777216 characters"),
    ],
)  # fmt: skip
def test_a_template_that_fails_is_refused(source: str, rule: str, monkeypatch: pytest.MonkeyPatch):
    # The same limit, reached sooner.
    monkeypatch.setattr("moe.data.conversations.template.SECONDS_EACH", 0.5)
    assert rule in refusal(source, {"messages": [USER, ANSWER, USER, ANSWER]}).rule


def test_an_invalid_template_is_refused():
    with expect_problem("invalid_syntax", "model.from/chat_template", None):
        list(template_of("{{ messages }}\n{% if %}").render_rows([conversation_of(ROW)]))


@pytest.mark.slow
def test_a_template_that_never_ends_is_stopped_in_bounded_time(monkeypatch: pytest.MonkeyPatch):
    limits = list[float]()

    def run_and_record(module: str, request: bytes, *, timeout_s: float, memory_bytes: int) -> bytes:
        limits.append(timeout_s)
        return run_limited(module, request, timeout_s=timeout_s, memory_bytes=memory_bytes)

    # The same limit, reached sooner: with its own 120 s the test would take four minutes.
    monkeypatch.setattr("moe.data.conversations.template.TIMEOUT_S", 2.0)
    # Starts the real process, and records its limit: the sum of these is what is promised.
    monkeypatch.setattr("moe.data.conversations.template.run_limited", run_and_record)
    assert refusal(ENDLESS, ROW).rule == "exceeds its time limit of 2 s, rendering this conversation"
    limits.clear()
    assert "rendering this conversation or one of" in refusal(ENDLESS, ROW, times=500).rule
    assert len(limits) > 1
    assert sum(limits) <= 2 * 2.0


def test_conversations_are_rendered_up_to_the_one_that_ends_the_process(monkeypatch: pytest.MonkeyPatch):
    # Templates that end their own process need much time, or memory that a busy machine may not have.
    def ending(module: str, request: bytes, **limits: float) -> bytes:
        if b'"bad"' in request:
            raise LimitedProcessError("crashes its reader")
        return run_limited(module, request, **limits)  # type: ignore[arg-type]

    monkeypatch.setattr("moe.data.conversations.template.run_limited", ending)
    rows = [{"prompt": prompt, "completion": "a"} for prompt in ("x", "y", "bad", "z")]
    outcomes = template_of(CHATML).render_rows([conversation_of(row) for row in rows])
    assert [isinstance(outcome, Rendering) for outcome in outcomes] == [True, True, False]


def test_a_date_is_required_where_the_template_uses_it():
    template = ChatTemplate({"default": STRUCTURES["llama"].source}, {"bos_token": "<s>"})
    (outcome,) = template.render_rows([conversation_of(ROW)])
    assert isinstance(outcome, UnreadableRecord)
    assert outcome.rule == "uses the date, but data.date is not set"


def test_templates_are_found_in_every_file_of_tokenizers():
    by_name = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    for files, sources in (
        (chats.tokenizer_files("x"), {"default": "x"}),
        (chats.tokenizer_files("x", in_config=True), {"default": "x"}),
        ({"tokenizer_config.json": json.dumps({"chat_template": by_name}).encode()}, {"default": "a", "tool_use": "b"}),
        ({"chat_template.json": b'{"chat_template": "c"}'}, {"default": "c"}),
    ):
        assert ChatTemplate.of_files(files).sources == sources
    variables = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    assert ChatTemplate.of_files(chats.tokenizer_files("x")).variables == variables
    for files in ({}, {"tokenizer_config.json": b"{}"}, {"tokenizer_config.json": b"[1"}):
        with expect_problem("missing", "model.from", None):
            ChatTemplate.of_files(files)


def test_conversations_with_tools_are_rendered_by_their_own_template():
    sources = {"default": STRUCTURES["llama"].source, "tool_use": CHATML}
    template = ChatTemplate(sources, {"bos_token": "<s>"}, DATE.isoformat())
    rows = [ROW, {**ROW, "tools": [chats.WEATHER]}, ROW]
    rendered_rows = rows_of(template.render_rows([conversation_of(row) for row in rows]))
    assert ["<|im_start|>" in row.text for row in rendered_rows] == [False, True, False]


def test_spaces_are_learned_also_where_a_tokenizer_trims_offsets():
    processor = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    trimming = tokenizer_of(json.dumps({**json.loads(chats.tokenizer_json()), "post_processor": processor}))
    plain = tokenizer_of(chats.tokenizer_json())
    rows = render(CHATML, {"prompt": "q", "completion": "if x:\n        return   1"})
    (by_trimming,), (by_plain,) = encode(trimming, rows), encode(plain, rows)
    assert by_trimming.ids.tolist() == by_plain.ids.tolist()
    assert by_trimming.label_mask.tolist() == by_plain.label_mask.tolist()
    assert trimming.encode("x  y") == plain.encode("x  y")


def test_an_unreadable_record_pickles():
    copy = pickle.loads(pickle.dumps(UnreadableRecord("rule", "remedy")))
    assert (copy.rule, copy.remedy) == ("rule", "remedy")

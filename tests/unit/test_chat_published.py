"""Published chat templates: each answer is learned once, behind what the model sees when it is asked for it,
as transformers renders that."""

import json
import random
from datetime import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from moe.data.conversations.conversation import RenderedText, Rendering
from moe.data.conversations.records import conversation_of
from moe.data.conversations.template import ChatTemplate
from tests.grid import num_cases
from tests.unit import chats
from tests.unit.chats import DATE
from tests.unit.published_templates import TEMPLATES, published

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
ENDS = {"glm4moe": ("<|endoftext|>", "<|user|>", "<|observation|>")}
OPENED = ("<think>", "<think>\n")


class _Fixed(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> "_Fixed":
        return cls(DATE.year, DATE.month, DATE.day, tzinfo=tz)


@pytest.fixture(autouse=True)
def _on_a_fixed_day(monkeypatch: pytest.MonkeyPatch) -> None:
    # Theirs knows no day but today's, and some templates ask for it.
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", _Fixed)


def theirs(name: str, row: dict[str, Any], number: int, *, asks: bool, **arguments: Any) -> str:
    """What transformers renders of the first messages of a record."""
    messages = [dict(each) for each in row["messages"][:number]]
    if name == "smolvlm":  # it renders parts alone
        messages = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
    (text,), _ = render_jinja_template(
        [messages], tools=row.get("tools"), chat_template=published(name), add_generation_prompt=asks,
        **TOKENS, **arguments,
    )  # fmt: skip
    return text


def rows_of(name: str, rows: list[dict[str, Any]], **arguments: Any) -> list[tuple[RenderedText, ...]]:
    template = ChatTemplate({"default": published(name)}, {**TOKENS, **arguments}, DATE.isoformat(), ENDS.get(name, ()))
    found = []
    for each in template.render_rows([conversation_of(row) for row in rows]):
        assert isinstance(each, Rendering), each
        found.append(each.rows)
    return found


def conversation(rng: random.Random, *, tools: bool, thoughts: str | None) -> dict[str, Any]:
    """A record by chance: turns of a call and its result between a question and an answer, where there are tools."""
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": _said(rng)})
    has_tools = tools and rng.random() < 0.7

    def think(message: dict[str, Any]) -> dict[str, Any]:
        return {**message, thoughts: f"hm {rng.random()}"} if thoughts and rng.random() < 0.6 else message

    for _ in range(rng.randrange(1, 4)):
        messages.append({"role": "user", "content": _said(rng)})
        while has_tools and rng.random() < 0.5:
            call = {"name": "weather", "arguments": {"place": _said(rng)}}
            calls = [{"id": "abcdefgh1", "type": "function", "function": call}]
            messages.append(think({"role": "assistant", "content": "", "tool_calls": calls}))
            messages.append({"role": "tool", "name": "weather", "content": _said(rng), "tool_call_id": "abcdefgh1"})
        messages.append(think({"role": "assistant", "content": _said(rng)}))
    return {"messages": messages, **({"tools": [chats.WEATHER]} if has_tools else {})}


def _said(rng: random.Random) -> str:
    words = ("the", "Sun", "größer", "日本", "x\ny", "a  b", "{{ 1 }}", "'", '"q"')
    return " ".join(rng.choice(words) for _ in range(rng.randrange(1, 7)))


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("thoughts", [None, "reasoning_content"])
def test_each_answer_is_learned_behind_what_the_model_sees_when_asked(name: str, thoughts: str | None):
    rng = random.Random(f"{name} {thoughts}")
    rows = [conversation(rng, tools=TEMPLATES[name], thoughts=thoughts) for _ in range(num_cases(30))]
    num_apart = 0
    for row, found in zip(rows, rows_of(name, rows), strict=True):
        num_apart += len(found) > 1
        learned = [(text.text, *span) for text in found for span in text.spans]
        answers = [at for at, each in enumerate(row["messages"]) if each["role"] == "assistant"]
        assert len(learned) == len(answers)
        for (text, begin, end), at in zip(learned, answers, strict=True):
            asked, answered = theirs(name, row, at, asks=True), theirs(name, row, at + 1, asks=False)
            assert text[:begin] == asked
            said, message = text[begin:end], row["messages"][at]
            if answered.startswith(asked):
                ended = said.removeprefix(answered[len(asked) :])
                assert len(ended) < len(said)
                assert ended in ("", *ENDS.get(name, ()))
            else:
                is_silent = asked.rstrip().endswith("</think>")
                assert is_silent or asked.endswith(OPENED) or name == "gptoss"
                assert message["content"].strip() in said
                assert (message.get("reasoning_content", "") in said) != is_silent
                assert answered.endswith(said[-6:]), "with the same end"
    re_rendered = {"qwen3", "gptoss", "deepseekv3", "deepseek_r1_distill", "nemotron_3_nano"}
    if name in re_rendered:
        assert num_apart


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["qwen3", "glm4moe", "qwen3_5_think", "nemotron_3_nano", "lfm2_2_5_v2", "gptoss"])
def test_thoughts_are_one_thing_by_whatever_name(name: str):
    texts = set()
    for key in ("reasoning_content", "thinking", "reasoning"):
        row = {"messages": [{"role": "user", "content": "q"},
                            {"role": "assistant", "content": "a", key: "so it is"}]}  # fmt: skip
        ((text,),) = rows_of(name, [row])
        assert "so it is" in text.text
        assert text.text.removesuffix("<|user|>") == theirs(name, row, 2, asks=False) or "<think>" in text.text
        texts.add((text.text, text.spans))
    assert len(texts) == 1


@pytest.mark.parametrize("name", ["qwen3", "glm4moe", "nemotron_3_nano", "qwen3_5_think"])
def test_a_model_that_is_asked_not_to_think_learns_answers_without_thoughts(name: str):
    row = {"messages": [{"role": "user", "content": "q"},
                        {"role": "assistant", "content": "a", "reasoning_content": "so it is"}]}  # fmt: skip
    ((text,),) = rows_of(name, [row], enable_thinking=False)
    ((begin, _),) = text.spans
    assert text.text[:begin] == theirs(name, row, 1, asks=True, enable_thinking=False)
    assert "so it is" not in text.text
    ((by_record,),) = rows_of(name, [{**row, "chat_template_kwargs": {"enable_thinking": False}}])
    assert by_record == text


def test_answers_of_glm_end_in_the_role_that_speaks_next():
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "thinking": "x"},
                {"role": "user", "content": "r"}, {"role": "assistant", "content": "b"}]  # fmt: skip
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "weather", "arguments": {}}]}
    told = [[row.text[a:b].rpartition("<")[2] for row in rows for a, b in row.spans]
            for rows in rows_of("glm4moe", [{"messages": messages}, {"messages": [*messages[:3], call]}])]  # fmt: skip
    assert told == [["|user|>", "|user|>"], ["|user|>", "|observation|>"]]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["qwen3", "llama3_2", "glm4moe", "gptoss", "qwen2_5"])
def test_arguments_of_tools_are_written_alike_as_text_and_as_object(name: str):
    texts = []
    for arguments in ({"place": "größer"}, json.dumps({"place": "größer"}, ensure_ascii=False)):
        call = {"id": "abcdefgh1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        row = {"tools": [chats.WEATHER], "messages": [
            {"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "weather", "content": "1", "tool_call_id": "abcdefgh1"},
            {"role": "assistant", "content": "a"}]}  # fmt: skip
        texts.append(rows_of(name, [row]))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["gptoss", "llama3_1", "llama3_2"])
def test_calls_get_a_message_each_where_a_template_writes_one(name: str):
    calls = [{"id": f"abcdefgh{at}", "type": "function", "function": {"name": "weather", "arguments": {"place": at}}}
             for at in range(3)]  # fmt: skip
    results = [{"role": "tool", "name": "weather", "content": f"r{at}", "tool_call_id": f"abcdefgh{at}"}
               for at in range(3)]  # fmt: skip
    question, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    several = [question, {"role": "assistant", "content": "", "tool_calls": calls}, *results[::-1], answer]
    one_each = [question]
    for call, result in zip(calls, results, strict=True):
        one_each += [{"role": "assistant", "content": "", "tool_calls": [call]}, result]
    found, expected = rows_of(name, [{"messages": several}, {"messages": [*one_each, answer]}])
    assert found == expected
    assert sum(len(row.spans) for row in found) == 4

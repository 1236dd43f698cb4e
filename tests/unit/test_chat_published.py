"""Published chat templates: each answer is learned once, after its generation prompt as transformers renders it."""

import random
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from moe.data.conversations.conversation import RenderedText, Rendering
from moe.data.conversations.records import conversation_of
from moe.data.conversations.template import ChatTemplate
from tests.grid import num_cases
from tests.unit.chats import ANSWER, DATE, OTHER, USER, WEATHER, FixedDay, some_text
from tests.unit.published_templates import TEMPLATES, read_template

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
ENDS = {"glm4moe": ("<|endoftext|>", "<|user|>", "<|observation|>")}
OPENED = ("<think>", "<think>\n")
WORDS = ("the", "Sun", "größer", "日本", "x\ny", "a  b", "{{ 1 }}", "'", '"q"')
RE_RENDERED = {"qwen3", "gptoss", "deepseekv3", "deepseek_r1_distill", "nemotron_3_nano"}


@pytest.fixture(autouse=True)
def _fixed_day(monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers renders today's date only.
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", FixedDay)


def by_transformers(name: str, row: dict[str, Any], num_messages: int, *, asks: bool, **arguments: Any) -> str:
    messages = [dict(message) for message in row["messages"][:num_messages]]
    if name == "smolvlm":  # it renders only parts
        messages = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    (text,), _ = render_jinja_template(
        [messages], tools=row.get("tools"), chat_template=read_template(name), add_generation_prompt=asks,
        **TOKENS, **arguments,
    )  # fmt: skip
    return text


def rows_of(name: str, rows: list[dict[str, Any]], **arguments: Any) -> list[tuple[RenderedText, ...]]:
    template = ChatTemplate(
        {"default": read_template(name)}, {**TOKENS, **arguments}, DATE.isoformat(), ENDS.get(name, ())
    )
    renderings = list(template.render_rows([conversation_of(row) for row in rows]))
    assert all(isinstance(rendering, Rendering) for rendering in renderings), renderings
    return [rendering.rows for rendering in renderings if isinstance(rendering, Rendering)]


def weather_call(place: object, number: int = 1) -> dict[str, Any]:
    function = {"name": "weather", "arguments": {"place": place}}
    return {"id": f"abcdefgh{number}", "type": "function", "function": function}


def weather_result(content: str, number: int = 1) -> dict[str, Any]:
    return {"role": "tool", "name": "weather", "content": content, "tool_call_id": f"abcdefgh{number}"}


def conversation(rng: random.Random, *, takes_tools: bool, thoughts: str | None) -> dict[str, Any]:
    """A random record: with tools, calls and their results between a question and its answer."""
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": some_text(rng, WORDS)})
    has_tools = takes_tools and rng.random() < 0.7

    def think(message: dict[str, Any]) -> dict[str, Any]:
        return {**message, thoughts: f"hm {rng.random()}"} if thoughts and rng.random() < 0.6 else message

    for _ in range(rng.randrange(1, 4)):
        messages.append({"role": "user", "content": some_text(rng, WORDS)})
        while has_tools and rng.random() < 0.5:
            call = weather_call(some_text(rng, WORDS))
            messages.append(think({"role": "assistant", "content": "", "tool_calls": [call]}))
            messages.append(weather_result(some_text(rng, WORDS)))
        messages.append(think({"role": "assistant", "content": some_text(rng, WORDS)}))
    return {"messages": messages, **({"tools": [WEATHER]} if has_tools else {})}


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("thoughts", [None, "reasoning_content"])
def test_each_answer_is_learned_after_its_generation_prompt(name: str, thoughts: str | None):
    rng = random.Random(f"{name} {thoughts}")
    rows = [conversation(rng, takes_tools=TEMPLATES[name], thoughts=thoughts) for _ in range(num_cases(30))]
    num_apart = 0
    for row, texts in zip(rows, rows_of(name, rows), strict=True):
        num_apart += len(texts) > 1
        spans = [(text.text, *span) for text in texts for span in text.spans]
        answers = [index for index, message in enumerate(row["messages"]) if message["role"] == "assistant"]
        for (text, begin, end), index in zip(spans, answers, strict=True):
            prompt = by_transformers(name, row, index, asks=True)
            transcript = by_transformers(name, row, index + 1, asks=False)
            assert text[:begin] == prompt
            answer, message = text[begin:end], row["messages"][index]
            if transcript.startswith(prompt):
                end_token = answer.removeprefix(transcript[len(prompt) :])
                assert len(end_token) < len(answer)
                assert end_token in ("", *ENDS.get(name, ()))
            else:
                is_silent = prompt.rstrip().endswith("</think>")
                assert is_silent or prompt.endswith(OPENED) or name == "gptoss"
                assert message["content"].strip() in answer
                assert (message.get("reasoning_content", "") in answer) != is_silent
                assert transcript.endswith(answer[-6:]), "with the same end"
    assert num_apart or name not in RE_RENDERED


@pytest.mark.parametrize("name", ["qwen3", "glm4moe", "nemotron_3_nano", "qwen3_5_think"])
def test_a_model_with_thinking_disabled_learns_answers_without_thoughts(name: str):
    row = {"messages": [USER, {**ANSWER, "reasoning_content": "so it is"}]}
    ((text,),) = rows_of(name, [row], enable_thinking=False)
    ((begin, _),) = text.spans
    assert text.text[:begin] == by_transformers(name, row, 1, asks=True, enable_thinking=False)
    assert "so it is" not in text.text
    ((by_record,),) = rows_of(name, [{**row, "chat_template_kwargs": {"enable_thinking": False}}])
    assert by_record == text


def test_answers_of_glm_end_in_the_role_that_speaks_next():
    messages = [USER, {**ANSWER, "thinking": "x"}, USER, OTHER]
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "weather", "arguments": {}}]}
    renderings = rows_of("glm4moe", [{"messages": messages}, {"messages": [*messages[:3], call]}])
    ends = [[row.text[a:b].rpartition("<")[2] for row in rows for a, b in row.spans] for rows in renderings]
    assert ends == [["|user|>", "|user|>"], ["|user|>", "|observation|>"]]


@pytest.mark.parametrize("name", ["gptoss", "llama3_1", "llama3_2"])
def test_each_call_has_a_message_of_its_own_where_a_template_renders_one(name: str):
    calls = [weather_call(number, number) for number in range(3)]
    results = [weather_result(f"r{number}", number) for number in range(3)]
    parallel = [USER, {"role": "assistant", "content": "", "tool_calls": calls}, *results[::-1], ANSWER]
    single = [USER]
    for call, result in zip(calls, results, strict=True):
        single += [{"role": "assistant", "content": "", "tool_calls": [call]}, result]
    actual, expected = rows_of(name, [{"messages": parallel}, {"messages": [*single, ANSWER]}])
    assert actual == expected
    assert sum(len(row.spans) for row in actual) == 4

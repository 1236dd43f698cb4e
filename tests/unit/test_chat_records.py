"""Records of conversations and pairs in users' formats: how they are read, and which are refused."""

from typing import Any

import pytest

from moe.data.conversations.conversation import UnreadableRecord
from moe.data.conversations.records import conversation_of, pair_of
from tests.unit.chats import ANSWER, OTHER, USER


def message_of(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def calling(*calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls), **fields}


def call(arguments: Any, name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **fields}


def sharegpt(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": speaker, "value": value} for speaker, value in turns]


SYSTEM, RESULT, CALL = message_of("system", "s"), message_of("tool", "2"), calling(call({}))
THINKING = {"type": "thinking", "thinking": "t"}
CALL_TEXT = '{"name": "f"}'


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"conversations": sharegpt(("human", "q"), ("gpt", "a")), "system": "s"}, [SYSTEM, USER, ANSWER]),
        ({"conversations": [USER, ANSWER]}, [USER, ANSWER]),
        ({"instruction": "q", "input": "", "output": "a"}, [USER, ANSWER]),
        ({"instruction": "q", "input": "i", "output": "a", "history": [["x", "y"]], "system": None},
         [message_of("user", "x"), message_of("assistant", "y"), message_of("user", "q\ni"), ANSWER]),
        ({"prompt": "q", "completion": "a"}, [USER, ANSWER]),
        ({"prompt": [USER], "completion": [ANSWER]}, [USER, ANSWER]),
        ({"prompt": [USER], "completion": "a", "system": "s"}, [SYSTEM, USER, ANSWER]),
        ({"messages": [USER, ANSWER], "system": "s"}, [SYSTEM, USER, ANSWER]),
        ({"messages": [message_of("user", [{"type": "text", "text": "q"}]), ANSWER], "prompt": None}, [USER, ANSWER]),
        ({"messages": [USER, message_of("assistant", None, name=None, tool_calls=[call('{"x": 1}', id="1")])]},
         [USER, calling(call('{"x": 1}', id="1"))]),
        ({"messages": [USER, calling({"function": {"name": "f", "arguments": " "}})]}, [USER, calling(call({}))]),
        ({"messages": [USER, message_of("assistant", "", function_call={"name": "f", "arguments": "{}"})]},
         [USER, calling(call("{}"))]),
        ({"conversations": sharegpt(("human", "q"), ("function_call", '{"name": "f", "arguments": {"x": 1}}'),
                                    ("observation", "2"), ("gpt", "a"))},
         [USER, calling(call({"x": 1})), RESULT, ANSWER]),
        ({"messages": [USER, message_of("tool_call", '{"name": "f", "arguments": {}}'),
                       message_of("tool_call", '{"name": "g", "arguments": {}}', loss=True),
                       message_of("tool_response", "2"), {"role": "ASSISTANT", "value": "a"}]},
         [USER, calling(call({}), call({}, "g")), RESULT, ANSWER]),
        ({"messages": [message_of("prompter", ["q"]), message_of("assistant", [
            {"type": "thinking", "thinking": [{"type": "text", "text": "t"}]}, {"type": "output_text", "text": "a"}])]},
         [USER, {**ANSWER, "reasoning_content": "t"}]),
        ({"messages": [USER, message_of("assistant", [THINKING, {"type": "text", "text": "a"}], reasoning="")]},
         [USER, {**ANSWER, "reasoning": "", "reasoning_content": "t"}]),
        ({"messages": [USER, {**ANSWER, "train": False}, USER, {**ANSWER, "weight": 1.0, "training": True}]},
         [USER, {**ANSWER, "weight": 0}, USER, ANSWER]),
        ({"messages": [USER, {**ANSWER, "training": 0}, USER, {**ANSWER, "train": 1}]},
         [USER, {**ANSWER, "weight": 0}, USER, ANSWER]),
        ({"messages": [USER, message_of("tool_call", CALL_TEXT, loss=False),
                       message_of("tool_call", CALL_TEXT, loss=True)]},
         [USER, {**CALL, "weight": 0}, CALL]),
        ({"messages": [USER, message_of("tool_call", CALL_TEXT),
                       message_of("tool_call", CALL_TEXT, reasoning_content="t")]},
         [USER, CALL, {**CALL, "reasoning_content": "t"}]),
        ({"messages": [USER, {**ANSWER, "loss": 0.37}], "label": True}, [USER, {**ANSWER, "loss": 0.37}]),
    ],
)  # fmt: skip
def test_records_of_every_form_are_read(row: dict[str, Any], messages: list[dict[str, Any]]):
    assert list(conversation_of(row).messages) == messages


@pytest.mark.parametrize(
    "speaker", ["human", "Human", "USER", " user ", "gpt", "GPT", "bing", "Bard", "chatgpt", "Assistant"]
)
def test_speakers_have_the_names_of_published_files(speaker: str):
    is_user = speaker.strip().lower() in ("human", "user")
    turns = [(speaker, "q"), ("gpt", "a")] if is_user else [("human", "q"), (speaker, "a")]
    assert list(conversation_of({"conversations": sharegpt(*turns)}).messages) == [USER, ANSWER]


def test_a_record_may_set_tools_and_arguments_of_the_template():
    row = {"messages": [USER, ANSWER], "chat_template_kwargs": '{"enable_thinking": false}', "images": [],
           "functions": [{"name": "f"}]}  # fmt: skip
    conversation = conversation_of(row)
    assert conversation.arguments == {"enable_thinking": False}
    assert conversation.tools == ({"type": "function", "function": {"name": "f"}},)
    assert conversation_of({"messages": [USER, ANSWER], "tools": ['{"name": "f"}']}).tools == ({"name": "f"},)
    chosen, rejected = pair_of({"prompt": "q", "chosen": "a", "rejected": "b", "chat_template_kwargs": {"x": 1}})
    assert chosen.arguments == rejected.arguments == {"x": 1}


NO_ANSWER = "has no message of the role assistant"
FALSE = "false: its answer must not be learned"


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({}, "has no keys, but none of messages"),
        ({"text": "x"}, "has the keys 'text', but none of messages"),
        ({"messages": "x"}, "has 'messages' that is a string, not a list"),
        ({"messages": ["x"]}, "has messages[0] that is a string, not an object"),
        ({"messages": [{"content": "x"}]}, "has messages[0] with the keys 'content', but no 'role'"),
        ({"messages": [message_of("narrator", "x")]}, "with the unknown role 'narrator'"),
        ({"messages": [USER, {"role": "assistant"}]}, "has messages[1] without 'content'"),
        ({"messages": [USER, message_of("assistant", 3)]}, "with content that is a number, not text"),
        ({"messages": [message_of("user", [{"type": "image"}])]}, "a part of type 'image' in its content"),
        ({"messages": [USER]}, NO_ANSWER),
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, NO_ANSWER),
        ({"messages": [USER, {**ANSWER, "loss": False}]}, NO_ANSWER),
        ({"messages": [USER, {**ANSWER, "tool_calls": [{"function": {}}]}]}, "with a tool call without a name"),
        ({"messages": [USER, calling({"name": "f", "arguments": "{"})]}, "which is not a JSON object"),
        ({"messages": [USER, calling(call("[1]"))]}, "with tool arguments that are a list"),
        ({"messages": [USER, calling(call(5))]}, "with tool arguments that are a number"),
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, "has messages[1].weight that is 0.5, not 0 or 1"),
        ({"messages": [USER, {**ANSWER, "weight": "0"}]}, "has messages[1].weight that is '0', not 0 or 1"),
        ({"prompt": "q", "completion": "a", "label": False}, f"has label {FALSE}"),
        ({"messages": [USER, ANSWER], "label": False}, f"has label {FALSE}"),
        ({"messages": [USER, ANSWER], "kto_tag": False}, f"has kto_tag {FALSE}"),
        ({"messages": [USER, ANSWER], "tools": ["x"]}, "tools[0]"),
        ({"messages": [USER, ANSWER], "tools": [1]}, "has tools[0] that is a number, not an object"),
        ({"messages": [USER, ANSWER], "tools": 3}, "has 'tools' that is a number"),
        ({"messages": [USER, ANSWER], "tools": "[1,"}, "has 'tools', which is not a JSON list"),
        ({"instruction": "q"}, "but no 'output'"),
        ({"prompt": "q"}, "but no 'completion'"),
        ({"instruction": 3, "output": "a"}, "has 'instruction' that is a number"),
        ({"instruction": "q", "output": "a", "history": ["x"]}, "has a 'history' that is not a list of question"),
        ({"messages": [USER, ANSWER], "images": ["a.png"]}, "has images, but only text is supported"),
        ({"messages": [{**USER, "image": "a.png"}, ANSWER]}, "has messages[0].image, but only text is supported"),
        ({"messages": [message_of("user", [{"type": "text", "text": "?"}, {"type": "image_url"}])]},
         "has messages[0] with a part of type 'image_url' in its content, but only text is supported"),
        ({"messages": [message_of("user", [{"type": "text", "text": "?", "image": None, "video": "a.mp4"}])]},
         "has messages[0].content.video, but only text is supported"),
        ({"messages": [USER, {**ANSWER, "thinking": ["x"]}]}, "has 'messages[1].thinking' that is a list, not text"),
        ({"messages": [USER, ANSWER], "chat_template_kwargs": [1]}, "has 'chat_template_kwargs' that is a list"),
        ({"messages": [USER, ANSWER], "chat_template_kwargs": {"messages": []}}, "with 'messages', which the record"),
        ({"messages": [SYSTEM, USER, ANSWER], "system": "t"}, "has both 'system' and a message of the role system"),
    ],
)  # fmt: skip
def test_a_record_without_a_conversation_is_refused(row: dict[str, Any], rule: str):
    with pytest.raises(UnreadableRecord) as refusal:
        conversation_of(row)
    assert rule in refusal.value.rule
    assert refusal.value.remedy


WHOLE = {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]},
        {"messages": [USER], "chosen": ANSWER, "rejected": OTHER},
        {"conversations": sharegpt(("human", "q")), "chosen": sharegpt(("gpt", "a"))[0], "rejected": OTHER},
        {"instruction": "q", "input": "", "chosen": "a", "rejected": "b"},
        WHOLE,
        {**WHOLE, "prompt": "q"},
        {**WHOLE, "prompt": "q", "messages": [USER, ANSWER]},
        {**WHOLE, "prompt": [USER]},
        {**WHOLE, "messages": [USER]},
        {**WHOLE, "prompt": [SYSTEM, USER]},
    ],
)  # fmt: skip
def test_pairs_of_every_form_are_read(row: dict[str, Any]):
    """The prompt of a complete conversation is not rendered twice, unless only the prompt has a system message."""
    chosen, rejected = pair_of(row)
    prompt = [SYSTEM, USER] if row.get("prompt") == [SYSTEM, USER] else [USER]
    assert (list(chosen.messages), list(rejected.messages)) == ([*prompt, ANSWER], [*prompt, OTHER])
    assert (chosen.num_given, rejected.num_given) == (len(prompt), len(prompt))


PARTED, ONE_WHOLE = "start with different messages, and no prompt", "of which only one starts with a question"


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({"prompt": "q", "chosen": "a"}, "but no 'rejected'"),
        ({"chosen": "a", "rejected": "b"}, PARTED),
        ({"chosen": [USER, ANSWER], "rejected": [message_of("user", "z"), OTHER]}, PARTED),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "has the same 'chosen' and 'rejected'"),
        ({"prompt": "q", "chosen": [USER], "rejected": "a"}, ONE_WHOLE),
        ({"prompt": "q", "chosen": [USER, ANSWER], "rejected": [OTHER]}, ONE_WHOLE),
        ({"prompt": "q", "chosen": [OTHER], "rejected": [USER, ANSWER]}, ONE_WHOLE),
        ({**WHOLE, "prompt": "another"}, "whose first messages differ from its prompt"),
        ({"messages": [USER, ANSWER], "chosen": "a", "rejected": "b"}, "end with an answer"),
    ],
)
def test_a_record_without_a_pair_is_refused(row: dict[str, Any], rule: str):
    with pytest.raises(UnreadableRecord) as refusal:
        pair_of(row)
    assert rule in refusal.value.rule

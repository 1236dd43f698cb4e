"""Records of conversations and of pairs, as users have them: what they say, and what is refused."""

from typing import Any

import pytest

from moe.data.conversations.conversation import UnreadableRecord
from moe.data.conversations.records import conversation_of, pair_of
from tests.unit.chats import ANSWER, OTHER, USER

CALL = {"role": "assistant", "content": "", "tool_calls": [
    {"type": "function", "function": {"name": "f", "arguments": {}}}]}  # fmt: skip


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": [USER, ANSWER]}, [USER, ANSWER]),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, [USER, ANSWER]),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
         [{"role": "system", "content": "s"}, USER, ANSWER]),
        ({"conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, [USER, ANSWER]),
        ({"instruction": "q", "input": "", "output": "a"}, [USER, ANSWER]),
        ({"instruction": "q", "input": "i", "output": "a", "history": [["x", "y"]], "system": None},
         [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"},
          {"role": "user", "content": "q\ni"}, ANSWER]),
        ({"prompt": "q", "completion": "a"}, [USER, ANSWER]),
        ({"prompt": [USER], "completion": [ANSWER]}, [USER, ANSWER]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, ANSWER], "prompt": None},
         [USER, ANSWER]),
        ({"messages": [USER, {"role": "assistant", "content": None, "name": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]}]},
         [USER, {"role": "assistant", "content": "", "tool_calls": [
             {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]}]),
        ({"messages": [USER, {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}}]},
         [USER, {"role": "assistant", "content": "", "tool_calls": [
             {"type": "function", "function": {"name": "f", "arguments": "{}"}}]}]),
        ({"conversations": [{"from": "human", "value": "q"},
                            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                            {"from": "observation", "value": "2"}, {"from": "gpt", "value": "a"}]},
         [USER, {"role": "assistant", "content": "", "tool_calls": [
             {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]},
          {"role": "tool", "content": "2"}, ANSWER]),
        ({"messages": [USER, {"role": "tool_call", "content": '{"name": "f", "arguments": {}}'},
                       {"role": "tool_call", "content": '{"name": "g", "arguments": {}}', "loss": True},
                       {"role": "tool_response", "content": "2"}, {"role": "ASSISTANT", "value": "a"}]},
         [USER, {"role": "assistant", "content": "", "tool_calls": [
             {"type": "function", "function": {"name": name, "arguments": {}}} for name in "fg"]},
          {"role": "tool", "content": "2"}, ANSWER]),
        ({"messages": [{"role": "prompter", "content": ["q"]}, {"role": "assistant", "content": [
            {"type": "thinking", "thinking": [{"type": "text", "text": "t"}]}, {"type": "output_text", "text": "a"}]}]},
         [USER, {**ANSWER, "reasoning_content": "t"}]),
        ({"messages": [USER, {**ANSWER, "train": False}, USER, {**ANSWER, "weight": 1.0, "training": True}]},
         [USER, {**ANSWER, "weight": 0}, USER, ANSWER]),
        ({"messages": [USER, *({"role": "tool_call", "content": '{"name": "f"}', "loss": is_learned}
                               for is_learned in (False, True))]},
         [USER, {**CALL, "weight": 0}, CALL]),
        ({"messages": [USER, {**ANSWER, "training": 0}, USER, {**ANSWER, "train": 1}]},
         [USER, {**ANSWER, "weight": 0}, USER, ANSWER]),
        ({"messages": [USER, {"role": "tool_call", "content": '{"name": "f"}'},
                       {"role": "tool_call", "content": '{"name": "f"}', "reasoning_content": "t"}]},
         [USER, CALL, {**CALL, "reasoning_content": "t"}]),
        ({"messages": [USER, {"role": "assistant", "reasoning": "", "content": [
            {"type": "thinking", "thinking": "t"}, {"type": "text", "text": "a"}]}]},
         [USER, {**ANSWER, "reasoning": "", "reasoning_content": "t"}]),
        ({"messages": [USER, {**ANSWER, "loss": 0.37}], "label": True},
         [USER, {**ANSWER, "loss": 0.37}]),
    ],
)  # fmt: skip
def test_records_are_read_as_users_have_them(row: dict[str, Any], messages: list[dict[str, Any]]):
    assert list(conversation_of(row).messages) == messages


def test_a_record_may_set_arguments_of_the_template_and_functions():
    row = {"messages": [USER, ANSWER], "chat_template_kwargs": '{"enable_thinking": false}', "images": [],
           "functions": [{"name": "f"}]}  # fmt: skip
    found = conversation_of(row)
    assert found.arguments == {"enable_thinking": False}
    assert found.tools == ({"type": "function", "function": {"name": "f"}},)
    assert conversation_of({"messages": [USER, ANSWER], "tools": ['{"name": "f"}']}).tools == ({"name": "f"},)
    chosen, rejected = pair_of({"prompt": "q", "chosen": "a", "rejected": "b", "chat_template_kwargs": {"x": 1}})
    assert chosen.arguments == rejected.arguments == {"x": 1}


def called(arguments: object) -> dict[str, Any]:
    """An answer that calls a tool."""
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


def test_a_call_without_arguments_has_none():
    (_, answer) = conversation_of({"messages": [USER, called(" ")]}).messages
    assert answer["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({}, "has no keys, but none of messages"),
        ({"text": "x"}, "has the keys 'text', but none of messages"),
        ({"messages": "x"}, "has 'messages' that is a string, not a list"),
        ({"messages": ["x"]}, "has messages[0] that is a string, not an object"),
        ({"messages": [{"content": "x"}]}, "has messages[0] with the keys 'content', but no 'role'"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "with the unknown role 'narrator'"),
        ({"messages": [USER, {"role": "assistant"}]}, "has messages[1] without 'content'"),
        ({"messages": [USER, {"role": "assistant", "content": 3}]}, "with content that is a number, not text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a part of type 'image' in its content"),
        ({"messages": [USER]}, "has no message of the role assistant"),
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, "has no message of the role assistant"),
        ({"messages": [USER, {**ANSWER, "tool_calls": [{"function": {}}]}]}, "with a tool call without a name"),
        ({"messages": [USER, {**ANSWER, "tool_calls": [{"name": "f", "arguments": "{"}]}]}, "which is not "
                                                            "a JSON object"),
        ({"messages": [USER, {**ANSWER, "loss": False}]}, "has no message of the role assistant"),
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, "has messages[1].weight that is 0.5, not 0 or 1"),
        ({"messages": [USER, {**ANSWER, "weight": "0"}]}, "has messages[1].weight that is '0', not 0 or 1"),
        ({"prompt": "q", "completion": "a", "label": False}, "has label false: its answer must not be learned"),
        ({"messages": [USER, ANSWER], "label": False}, "has label false: its answer must not be learned"),
        ({"messages": [USER, ANSWER], "kto_tag": False}, "has kto_tag false: its answer must not be learned"),
        ({"messages": [USER, ANSWER], "tools": ["x"]}, "tools[0]"),
        ({"messages": [USER, ANSWER], "tools": [1]}, "has tools[0] that is a number, not an object"),
        ({"instruction": "q"}, "but no 'output'"),
        ({"prompt": "q"}, "but no 'completion'"),
        ({"instruction": 3, "output": "a"}, "has 'instruction' that is a number"),
        ({"instruction": "q", "output": "a", "history": ["x"]}, "has a 'history' that is not a "
                                                            "list of question and answer pairs"),
        ({"messages": [USER, ANSWER], "tools": 3}, "has 'tools' that is a number"),
        ({"messages": [USER, ANSWER], "tools": "[1,"}, "has 'tools', which is not a JSON list"),
        ({"messages": [USER, called("[1]")]}, "with tool arguments that are a list"),
        ({"messages": [USER, called(5)]}, "with tool arguments that are a number"),
        ({"messages": [USER, ANSWER], "images": ["a.png"]}, "has images, but only text is supported"),
        ({"messages": [{**USER, "image": "a.png"}, ANSWER]}, "has messages[0].image, but only text is supported"),
        ({"messages": [USER, {**ANSWER, "thinking": ["x"]}]}, "has 'messages[1].thinking' that is a list, not text"),
        ({"messages": [USER, ANSWER], "chat_template_kwargs": [1]}, "has 'chat_template_kwargs' that is a list"),
        ({"messages": [USER, ANSWER], "chat_template_kwargs": {"messages": []}}, "with 'messages', which the record"),
    ],
)  # fmt: skip
def test_a_record_that_is_no_conversation_is_refused(row: dict[str, Any], rule: str):
    with pytest.raises(UnreadableRecord) as found:
        conversation_of(row)
    assert rule in found.value.rule
    assert found.value.remedy


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]},
        {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
        {"messages": [USER], "chosen": ANSWER, "rejected": OTHER},
        {"conversations": [{"from": "human", "value": "q"}], "chosen": {"from": "gpt", "value": "a"},
         "rejected": {"from": "gpt", "value": "b"}},
        {"instruction": "q", "input": "", "chosen": "a", "rejected": "b"},
    ],
)  # fmt: skip
def test_pairs_are_read_as_users_have_them(row: dict[str, Any]):
    chosen, rejected = pair_of(row)
    assert (list(chosen.messages), list(rejected.messages)) == ([USER, ANSWER], [USER, OTHER])
    assert (chosen.num_given, rejected.num_given) == (1, 1)


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({"prompt": "q", "chosen": "a"}, "but no 'rejected'"),
        ({"chosen": "a", "rejected": "b"}, "has a 'chosen' and a 'rejected' that start "
                                           "with different messages, and no prompt"),
        ({"chosen": [USER, ANSWER], "rejected": [{"role": "user", "content": "z"}, OTHER]}, "has a 'chosen' and a "
                                                            "'rejected' that start "
                                                            "with different messages, and no prompt"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "has the same 'chosen' and 'rejected'"),
        ({"prompt": "q", "chosen": [USER], "rejected": "a"}, "has a 'chosen' and a 'rejected' of "
                                                            "which only one starts with a question"),
        ({"prompt": "q", "chosen": [USER, ANSWER], "rejected": [OTHER]}, "has a 'chosen' and a 'rejected' of "
                                                            "which only one starts with a question"),
        ({"prompt": "q", "chosen": [OTHER], "rejected": [USER, ANSWER]}, "has a 'chosen' and a 'rejected' of "
                                                            "which only one starts with a question"),
    ],
)  # fmt: skip
def test_a_record_that_is_no_pair_is_refused(row: dict[str, Any], rule: str):
    with pytest.raises(UnreadableRecord) as found:
        pair_of(row)
    assert rule in found.value.rule


def test_whole_conversations_of_a_pair_are_not_put_behind_their_prompt_again():
    whole = {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]}
    plain = pair_of(whole)
    system = {"role": "system", "content": "s"}
    for row in (
        {**whole, "prompt": "q"},
        {**whole, "prompt": "q", "messages": [USER, ANSWER]},
        {**whole, "prompt": [USER]},
        {"messages": [USER], **whole},
    ):
        assert pair_of(row) == plain
    chosen, rejected = pair_of({**whole, "prompt": [system, USER]})
    assert (list(chosen.messages), list(rejected.messages)) == ([system, USER, ANSWER], [system, USER, OTHER])
    assert chosen.num_given == 2
    with pytest.raises(UnreadableRecord) as found:
        pair_of({**whole, "prompt": "another"})
    assert "has a 'chosen' or 'rejected' that starts with other messages than its prompt" in found.value.rule
    with pytest.raises(UnreadableRecord) as found:
        pair_of({"messages": [USER, ANSWER], "chosen": "a", "rejected": "b"})
    assert "end with an answer" in found.value.rule


def test_a_system_prompt_beside_messages_stands_before_them():
    system = {"role": "system", "content": "s"}
    for row in (
        {"messages": [USER, ANSWER], "system": "s"},
        {"prompt": [USER], "completion": "a", "system": "s"},
        {"conversations": [USER, ANSWER], "system": "s"},
    ):
        assert list(conversation_of(row).messages) == [system, USER, ANSWER]
    with pytest.raises(UnreadableRecord) as found:
        conversation_of({"messages": [system, USER, ANSWER], "system": "t"})
    assert "has both 'system' and a message of the role system" in found.value.rule

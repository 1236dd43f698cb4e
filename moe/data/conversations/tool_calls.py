"""Tool calls in the form that a chat template takes: arguments as an object or as JSON text, one call per message or
several. A template does not declare its form, so it is found by rendering probe calls."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moe.data.conversations.conversation import ASSISTANT, Conversation, Message, UnreadableRecord

_ARGUMENTS = {"probe": 1}
_NAMES, _ID = ("probe_one", "probe_two"), "trialcal{}"
_QUESTION: Message = {"role": "user", "content": "x"}


@dataclass(frozen=True)
class CallForms:
    """Forms of tool calls that a template renders."""

    takes_text: bool
    """Whether arguments given as JSON text are rendered unchanged: some templates quote them again, or fail."""
    takes_objects: bool
    """Whether arguments given as objects are rendered as JSON or tags: templates that join strings fail."""
    takes_several: bool
    """Whether all calls of a message are rendered."""
    writes_ids: bool = False
    """Whether calls are rendered by id, without the name, as by Kimi K2: the id must then contain the name."""

    @classmethod
    def from_template(cls, render: Callable[[Sequence[Message]], str]) -> "CallForms":
        """Forms of the template behind `render`. Never raises."""

        def render_calls(*calls: Mapping[str, Any]) -> str:
            try:
                return render([_QUESTION, {"role": ASSISTANT, "content": "", "tool_calls": list(calls)}])
            except UnreadableRecord:
                return ""

        text = json.dumps(_ARGUMENTS)
        text_rendering, object_rendering = render_calls(_call(text)), render_calls(_call(_ARGUMENTS))
        takes_objects = "probe" in object_rendering.replace(_NAMES[0], "") and repr(_ARGUMENTS) not in object_rendering
        form, one_call = (_ARGUMENTS, object_rendering) if takes_objects else (text, text_rendering)
        two_calls = render_calls(_call(form), _call(form, 1))
        writes_ids = _NAMES[0] not in one_call and _ID.format(0) in one_call
        signs = (_ID.format(0), _ID.format(1)) if writes_ids else _NAMES
        return cls(text in text_rendering, takes_objects, signs[0] not in one_call or signs[1] in two_calls, writes_ids)

    def apply(self, conversation: Conversation) -> Conversation:
        """The same conversation with its calls in these forms."""
        messages, num_given = list[Message](), 0
        messages_with_ids = _rename_call_ids(conversation.messages) if self.writes_ids else conversation.messages
        for position, turn_messages in self._turns(messages_with_ids):
            messages += turn_messages
            if position <= conversation.num_given:
                num_given = len(messages)
        return replace(conversation, messages=tuple(messages), num_given=num_given)

    def _turns(self, messages: Sequence[Message]) -> Iterator[tuple[int, list[Message]]]:
        """(number of messages consumed, messages that replace those consumed last), in order."""
        position = 0
        while position < len(messages):
            message = messages[position]
            calls = [self._in_form(call) for call in message.get("tool_calls") or ()]
            position += 1
            if not calls:
                yield position, [message]
            elif self.takes_several or len(calls) == 1:
                yield position, [{**message, "tool_calls": calls}]
            else:
                results = _results(messages[position:])[: len(calls)]
                position += len(results)
                yield position, list(_split_calls(message, calls, results))

    def _in_form(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str) and not self.takes_text:
            arguments = json.loads(arguments)
        elif not isinstance(arguments, str) and self.takes_text and not self.takes_objects:
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}


def _call(arguments: Any, number: int = 0) -> dict[str, Any]:
    function = {"name": _NAMES[number], "arguments": arguments}
    return {"id": _ID.format(number), "type": "function", "function": function}


def _rename_call_ids(messages: Sequence[Message]) -> list[Message]:
    """The same messages with call ids that contain the function's name, as Kimi K2 was trained on:
    `functions.NAME:NUMBER`, numbered over the conversation. Results without an id are matched to the calls in order."""
    number, named_messages, pending_ids = 0, list[Message](), list[tuple[Any, str]]()
    for message in messages:
        if calls := message.get("tool_calls"):
            pending_ids, new_calls = [], []
            for call in calls:
                id, name = str(call.get("id", "")), call["function"]["name"]
                new_id = id if name in id else f"functions.{name}:{number}"
                number += 1
                pending_ids.append((call.get("id"), new_id))
                new_calls.append({**call, "id": new_id})
            message = {**message, "tool_calls": new_calls}
        elif message["role"] == "tool" and pending_ids:
            matching_ids = [
                pair for pair in pending_ids if pair[0] is not None and pair[0] == message.get("tool_call_id")
            ]
            pair = (matching_ids or pending_ids)[0]
            pending_ids.remove(pair)
            message = {**message, "tool_call_id": pair[1]}
        named_messages.append(message)
    return named_messages


def _results(messages: Sequence[Message]) -> list[Message]:
    """The tool results at the beginning of `messages`."""
    number = next((index for index, message in enumerate(messages) if message["role"] != "tool"), len(messages))
    return list(messages[:number])


def _split_calls(message: Message, calls: Sequence[Any], results: Sequence[Message]) -> Iterator[Message]:
    """One message per call, each followed by its result; the first has the thoughts and content."""
    by_id = {result["tool_call_id"]: result for result in results if "tool_call_id" in result}
    has_ids = len(by_id) == len(results) and {call.get("id") for call in calls} >= set(by_id)
    for number, call in enumerate(calls):
        if number == 0:
            yield {**message, "tool_calls": [call]}
        else:
            fields = {"role": message["role"], "content": "", "tool_calls": [call]}
            yield {**fields, "weight": message["weight"]} if "weight" in message else fields
        if has_ids:
            yield from (by_id[call["id"]],) if call.get("id") in by_id else ()
        elif number < len(results):
            yield results[number]

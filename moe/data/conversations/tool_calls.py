"""Calls of tools in the form that a chat template takes: arguments as an object or as JSON text, one call a message or
several. A template does not say which; a call of its own making, rendered, tells."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moe.data.conversations.conversation import ASSISTANT, Conversation, Message, Unreadable

_ARGUMENTS = {"probe": 1}
_NAMES = ("probe_one", "probe_two")
_QUESTION: Message = {"role": "user", "content": "x"}


@dataclass(frozen=True)
class CallForms:
    """Forms of calls that a template writes."""

    takes_text: bool
    """Whether arguments that are JSON text come out as that text: some templates quote it a second time, or fail."""
    takes_objects: bool
    """Whether arguments that are objects come out as JSON or tags: templates that join strings fail."""
    takes_several: bool
    """Whether all calls of a message are written."""

    @classmethod
    def of(cls, render: Callable[[Sequence[Message]], str]) -> "CallForms":
        """Forms of the template that `render` renders messages by; raises nothing."""

        def rendered(*calls: Mapping[str, Any]) -> str:
            try:
                return render([_QUESTION, {"role": ASSISTANT, "content": "", "tool_calls": list(calls)}])
            except Unreadable:
                return ""

        text = json.dumps(_ARGUMENTS)
        of_text, of_object = rendered(_call(text)), rendered(_call(_ARGUMENTS))
        takes_objects = "probe" in of_object.replace(_NAMES[0], "") and repr(_ARGUMENTS) not in of_object
        form, of_one = (_ARGUMENTS, of_object) if takes_objects else (text, of_text)
        of_two = rendered(_call(form), _call(form, 1))
        return cls(text in of_text, takes_objects, _NAMES[0] not in of_one or _NAMES[1] in of_two)

    def applied(self, conversation: Conversation) -> Conversation:
        """The same conversation with its calls in these forms."""
        messages, num_given = list[Message](), 0
        for at, some in self._in_turn(conversation.messages):
            messages += some
            if at <= conversation.num_given:
                num_given = len(messages)
        return replace(conversation, messages=tuple(messages), num_given=num_given)

    def _in_turn(self, messages: Sequence[Message]) -> Iterator[tuple[int, list[Message]]]:
        """(number of messages up to there, messages that take the place of the last of them), in order."""
        at = 0
        while at < len(messages):
            message = messages[at]
            calls = [self._in_form(call) for call in message.get("tool_calls") or ()]
            at += 1
            if not calls:
                yield at, [message]
            elif self.takes_several or len(calls) == 1:
                yield at, [{**message, "tool_calls": calls}]
            else:
                results = _results(messages[at:])[: len(calls)]
                at += len(results)
                yield at, list(_apart(message, calls, results))

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
    return {"id": f"probecal{number}", "type": "function", "function": function}


def _results(messages: Sequence[Message]) -> list[Message]:
    """Results of tools that messages begin with."""
    number = next((at for at, each in enumerate(messages) if each["role"] != "tool"), len(messages))
    return list(messages[:number])


def _apart(message: Message, calls: Sequence[Any], results: Sequence[Message]) -> Iterator[Message]:
    """A message for each call, the thoughts with the first, each followed by its result."""
    by_id = {result["tool_call_id"]: result for result in results if "tool_call_id" in result}
    has_ids = len(by_id) == len(results) and {call.get("id") for call in calls} >= set(by_id)
    for number, call in enumerate(calls):
        if number == 0:
            yield {**message, "tool_calls": [call]}
        else:
            kept = {"role": message["role"], "content": "", "tool_calls": [call]}
            yield {**kept, "weight": message["weight"]} if "weight" in message else kept
        if has_ids:
            yield from (by_id[call["id"]],) if call.get("id") in by_id else ()
        elif number < len(results):
            yield results[number]

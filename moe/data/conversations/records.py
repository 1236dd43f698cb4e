"""Conversion of records in users' files to conversations, by their keys.

| | |
|---|---|
| `messages` | objects with `role` and `content`, separate `tools` (OpenAI, transformers) |
| `conversations` | objects with `from` and `value`, separate `system` and `tools` (ShareGPT) |
| `instruction`, `input`, `output` | texts, with `system` and `history` (Alpaca) |
| `prompt`, `completion` | texts or messages (TRL) |

A record may also have `chat_template_kwargs`, arguments of the template. Pictures and sounds are refused. In a
preference pair, `chosen` and `rejected` replace the last answer.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moe.data.conversations.conversation import ASSISTANT, ROLES, Conversation, Message, UnreadableRecord
from moe.data.conversations.thoughts import NAMES as THOUGHTS
from moe.data.json_lines import kind_of
from moe.spec.conversations import RESERVED

_CALLS = "function_call"
_SPEAKERS = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "bing": "assistant", "bard": "assistant", "claude": "assistant", "ai": "assistant",
    "prompter": "user", "observation": "tool", "function_response": "tool", "tool_response": "tool",
    "tool_result": "tool", _CALLS: _CALLS, "tool_call": _CALLS, **{role: role for role in ROLES},
}  # fmt: skip
"""Roles by the names that ShareGPT and other trainers use for them, in lower case."""
_KEYS = "messages, conversations, instruction and output, or prompt and completion"
PAIR = ("chosen", "rejected")
"""Keys of the answers of a preference pair, the preferred one first."""
ARGUMENTS = "chat_template_kwargs"
"""Key of the arguments that a record gives the template, as transformers and TRL name them."""
MEDIA = (
    "images", "image", "videos", "video", "audios", "audio", "image_url", "image_urls", "video_url", "audio_url",
    "pixel_values",
)  # fmt: skip
LABELS = ("label", "kto_tag")
"""Keys of unpaired preferences (KTO) that say whether a record's answer is desirable."""
_LEARNED = ("train", "training", "loss")
"""Keys that say whether a message is learned, in addition to OpenAI's `weight`."""
_TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of a content part that is text."""
_INSTRUCTING = ("system", "developer")
_BEGINNING = (*_INSTRUCTING, "user")
"""Roles that may begin a conversation."""


def conversation_of(row: Mapping[str, Any]) -> Conversation:
    """Conversation of a record. Raises UnreadableRecord for a record that has none, or none with an answer to learn."""
    _refuse_media(row)
    messages = _prompt(row)
    if messages is None:
        raise UnreadableRecord(f"has {_describe_keys(row)}, but none of {_KEYS}", "rename its keys")
    for key in LABELS:
        if row.get(key) is False:
            raise UnreadableRecord(f"has {key} false: its answer must not be learned", "remove the record")
    answer = answer_key(row)
    if answer is not None:
        messages = [*messages, *answer_messages(row[answer], answer)]
    return require_answer(Conversation(tuple(messages), _tools(row), arguments=_arguments(row)))


def pair_of(row: Mapping[str, Any]) -> tuple[Conversation, Conversation]:
    """The two conversations of a record with `chosen` and `rejected`, the preferred one first. The common first
    messages, up to the last one that is not an answer, are context and not learned. Raises UnreadableRecord."""
    for key in PAIR:
        if _is_missing(row, key):
            raise UnreadableRecord(f"has {_describe_keys(row)}, but no {key!r}", "add both chosen and rejected")
    _refuse_media(row)
    prompt = _prompt(row) or []
    ends = [answer_messages(row[key], key) for key in PAIR]
    have_question = [bool(end) and end[0]["role"] in _BEGINNING for end in ends]
    if all(have_question):
        prompt, ends = [], _with_system_prompt(prompt, ends)
    elif any(have_question):
        rule = "has a 'chosen' and a 'rejected' of which only one starts with a question"
        raise UnreadableRecord(rule, "include the question in both, or in neither")
    elif prompt and prompt[-1]["role"] == ASSISTANT:
        rule = "has messages that end with an answer, followed by 'chosen' and 'rejected'"
        raise UnreadableRecord(rule, "remove that answer, or include all earlier messages in both")
    num_given = len(prompt)
    if not prompt:
        num_given = _num_common(*ends)
        if not num_given:
            raise UnreadableRecord(
                "has a 'chosen' and a 'rejected' that start with different messages, and no prompt",
                "start both with the common messages, or put these under 'prompt'",
            )
    tools, arguments = _tools(row), _arguments(row)
    chosen_conversation, rejected_conversation = (
        require_answer(Conversation((*prompt, *end), tools, num_given, arguments), key)
        for key, end in zip(PAIR, ends, strict=True)
    )
    if chosen_conversation == rejected_conversation:
        raise UnreadableRecord("has the same 'chosen' and 'rejected'", "remove the record")
    return chosen_conversation, rejected_conversation


def _with_system_prompt(prompt: Sequence[Message], ends: Sequence[list[Message]]) -> list[list[Message]]:
    """Complete conversations from both ends, preceded by the system prompt of `prompt` if they have none."""
    head = [message for message in prompt if message["role"] in _INSTRUCTING][:1]
    first_turn = [message for message in prompt if message["role"] not in _INSTRUCTING][:1]
    for end in ends:
        if first_turn and [message for message in end if message["role"] not in _INSTRUCTING][:1] != first_turn:
            rule = "has a 'chosen' or 'rejected' whose first messages differ from its prompt"
            raise UnreadableRecord(rule, "give only the answers, or remove the prompt")
    return [end if end[0]["role"] in _INSTRUCTING else [*head, *end] for end in ends]


def _prompt(row: Mapping[str, Any]) -> list[Message] | None:
    """Messages of a record, without an answer under a separate key; None if there are none."""
    for key in ("messages", "conversations"):
        if not _is_missing(row, key):
            return _with_system(row, _messages(row[key], key))
    if not _is_missing(row, "instruction"):
        question = _text(row["instruction"], "instruction")
        if not _is_missing(row, "input") and (value := _text(row["input"], "input")):
            question = f"{question}\n{value}"
        return [*_system(row), *_history(row), {"role": "user", "content": question}]
    if not _is_missing(row, "prompt"):
        value = row["prompt"]
        if isinstance(value, str):
            return [*_system(row), {"role": "user", "content": value}]
        return _with_system(row, _messages(value, "prompt"))
    return None


def answer_key(row: Mapping[str, Any]) -> str | None:
    """Key of an answer that is separate from the prompt. Raises UnreadableRecord if it is missing."""
    if not _is_missing(row, "messages") or not _is_missing(row, "conversations"):
        return None
    key = "output" if not _is_missing(row, "instruction") else "completion"
    if _is_missing(row, key):
        raise UnreadableRecord(f"has {_describe_keys(row)}, but no {key!r}", "add the answer, or remove the record")
    return key


def answer_messages(value: Any, key: str) -> list[Message]:
    """Messages of an answer under a key of its own. Raises UnreadableRecord."""
    if isinstance(value, str):
        return [{"role": ASSISTANT, "content": value}]
    return _messages([value] if isinstance(value, Mapping) else value, key)


def _system(row: Mapping[str, Any]) -> list[Message]:
    if _is_missing(row, "system") or not (text := _text(row["system"], "system")):
        return []
    return [{"role": "system", "content": text}]


def _with_system(row: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    """The messages, preceded by the record's separate system prompt, if there is one."""
    system = _system(row)
    if system and messages and messages[0]["role"] == "system":
        raise UnreadableRecord("has both 'system' and a message of the role system", "remove one of them")
    return [*system, *messages]


def _history(row: Mapping[str, Any]) -> Iterable[Message]:
    """Earlier questions and answers in Alpaca's records."""
    turns = row.get("history") or ()
    if not isinstance(turns, Sequence) or any(
        not isinstance(turn, Sequence) or isinstance(turn, str) or len(turn) != 2 for turn in turns
    ):
        raise UnreadableRecord("has a 'history' that is not a list of question and answer pairs", "write [[q, a], ...]")
    for question, answer in turns:
        yield {"role": "user", "content": _text(question, "history")}
        yield {"role": ASSISTANT, "content": _text(answer, "history")}


def _messages(raw_messages: Any, key: str) -> list[Message]:
    if isinstance(raw_messages, str | bytes | Mapping) or not isinstance(raw_messages, Sequence):
        raise UnreadableRecord(
            f"has {key!r} that is {kind_of(raw_messages)}, not a list of messages", "write a list of objects"
        )
    messages = list[Message]()
    for index, raw_message in enumerate(raw_messages):
        message, is_call = _message(raw_message, f"{key}[{index}]")
        if is_call and messages and _continues(messages[-1], message):
            previous = messages[-1]
            messages[-1] = {**previous, "tool_calls": [*previous["tool_calls"], *message["tool_calls"]]}
        else:
            messages.append(message)
    return messages


def _continues(previous: Message, call: Message) -> bool:
    """Whether a tool call with its own role continues the calls of the previous message."""
    has_calls = previous["role"] == ASSISTANT and bool(previous.get("tool_calls"))
    has_thoughts = any(call.get(name) for name in THOUGHTS)
    return has_calls and not has_thoughts and previous.get("weight") == call.get("weight")


def _message(raw_message: Any, place: str) -> tuple[Message, bool]:
    """(message, whether its role is that of a tool call)."""
    if not isinstance(raw_message, Mapping):
        raise UnreadableRecord(f"has {place} that is {kind_of(raw_message)}, not an object", "write role and content")
    fields = {name: value for name, value in raw_message.items() if value is not None}
    role = _role(fields, place)
    _refuse_media(fields, f"{place}.")
    for name in THOUGHTS:
        if name in fields:
            _text(fields[name], f"{place}.{name}")
    content, thoughts = _content(fields.pop("content", None), place)
    if thoughts and not any(fields.get(name, "").strip() for name in THOUGHTS):
        fields[THOUGHTS[0]] = thoughts
    if role in (ASSISTANT, _CALLS) and not _is_learned(fields, place):
        fields["weight"] = 0
    if "function_call" in fields and "tool_calls" not in fields:  # OpenAI's older form, for one call
        fields["tool_calls"] = [fields.pop("function_call")]
    is_call = role == _CALLS
    if is_call:
        role, fields["tool_calls"], content = ASSISTANT, _parse_calls(content, place), ""
    if fields.get("tool_calls"):
        fields["tool_calls"] = [_call(call, place) for call in _list(fields["tool_calls"], f"{place}.tool_calls")]
    elif content is None:
        raise UnreadableRecord(f"has {place} without 'content'", "add the text, or remove the message")
    return {"role": role, "content": content or "", **fields}, is_call


def _role(fields: dict[str, Any], place: str) -> str:
    """Remove a message's role from its fields and return it; ShareGPT's `value` becomes `content`."""
    role = fields.pop("role", None)
    if role is None and "from" in fields:
        role = fields.pop("from")
    if "content" not in fields and "value" in fields:
        fields["content"] = fields.pop("value")
    if role is None:
        raise UnreadableRecord(f"has {place} with {_describe_keys(fields)}, but no 'role' or 'from'", "add the role")
    speaker = role.strip().lower() if isinstance(role, str) else None
    if speaker not in _SPEAKERS:
        choices = ", ".join(dict.fromkeys((*ROLES, *_SPEAKERS)))
        raise UnreadableRecord(f"has {place} with the unknown role {role!r:.60}", f"use one of {choices}")
    return _SPEAKERS[speaker]


def _is_learned(fields: dict[str, Any], place: str) -> bool:
    """Whether an answer is learned. Removes the keys that say so from its fields."""
    weight = fields.pop("weight", 1)
    if not isinstance(weight, bool | int | float) or weight not in (0, 1):
        raise UnreadableRecord(f"has {place}.weight that is {weight!r:.60}, not 0 or 1", "write 0 or 1")
    flags = [fields.pop(name) for name in _LEARNED if isinstance(fields.get(name), int) and fields[name] in (0, 1)]
    return bool(weight) and all(flags)


def _content(content: Any, place: str) -> tuple[str | None, str]:
    """(text, thoughts) of a message's content, which is a string or a list of parts."""
    if content is None or isinstance(content, str):
        return content, ""
    if isinstance(content, bytes) or not isinstance(content, Sequence):
        raise UnreadableRecord(f"has {place} with content that is {kind_of(content)}, not text", "write a string")
    texts, thoughts = list[str](), list[str]()
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(part, str):
            texts.append(part)
        elif kind in _TEXT_PARTS:
            _refuse_media(part, f"{place}.content.")
            texts.append(_text(part.get("text"), f"{place}.content"))
        elif kind == "thinking":
            text, _ = _content(part.get("thinking"), place)
            thoughts.append(text or "")
        else:
            description = f"a part of type {kind!r:.60}" if kind is not None else "a part without a type"
            raise UnreadableRecord(f"has {place} with {description} in its content, but only text is supported",
                             "remove the record, or keep only its text")  # fmt: skip
    return "".join(texts), "".join(thoughts)


def _call(raw_call: Any, place: str) -> dict[str, Any]:
    """A tool call. Its arguments stay an object or JSON text, as in the record: `CallForms` converts them to the
    template's form."""
    if not isinstance(raw_call, Mapping):
        raise UnreadableRecord(f"has {place} with a tool call that is {kind_of(raw_call)}", "write an object")
    function = raw_call.get("function", raw_call)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UnreadableRecord(f"has {place} with a tool call without a name", "name the function")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str) and not arguments.strip():
        arguments = {}
    value = arguments
    if isinstance(arguments, str):
        value = _object(arguments, f"{place}, arguments of {function['name']!r:.60}")
    if not isinstance(value, Mapping):
        raise UnreadableRecord(f"has {place} with tool arguments that are {kind_of(value)}", "write an object")
    function_call = {**function, "arguments": arguments}
    fields = {name: value for name, value in raw_call.items() if value is not None}
    return {"type": "function", **fields, "function": function_call} if "function" in raw_call else {
        "type": "function", "function": function_call}  # fmt: skip


def _parse_calls(content: str | None, place: str) -> list[Any]:
    """Tool calls that ShareGPT's records have as text."""
    calls = _object(content or "", f"{place}, the called function")
    return calls if isinstance(calls, list) else [calls]


def _object(text: str, subject: str, kind: str = "object") -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict | list):
        raise UnreadableRecord(f"has {subject}, which is not a JSON {kind}", "write one")
    return value


def _refuse_media(fields: Mapping[str, Any], place: str = "") -> None:
    """Raise UnreadableRecord for pictures or sounds, without which the text would mean something else."""
    for name in MEDIA:
        if fields.get(name):
            raise UnreadableRecord(f"has {place}{name!s}, but only text is supported", "remove the record")


def _arguments(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Arguments of the template that a record sets."""
    arguments = row.get(ARGUMENTS)
    if isinstance(arguments, str):
        arguments = _object(arguments, repr(ARGUMENTS)) if arguments.strip() else None
    if arguments is None:
        return None
    if not isinstance(arguments, Mapping):
        raise UnreadableRecord(f"has {ARGUMENTS!r} that is {kind_of(arguments)}, not an object", "write an object")
    for name in arguments:
        if name in RESERVED:
            raise UnreadableRecord(f"has {ARGUMENTS!r} with {name!r}, which the record itself sets", "omit it")
    return arguments or None


def _tools(row: Mapping[str, Any]) -> tuple[Any, ...] | None:
    if _is_missing(row, "tools"):
        if row.get("functions"):  # OpenAI's older form
            raw_tools = _list(row["functions"], "functions")
            return tuple({"type": "function", "function": function} for function in raw_tools)
        return None
    raw_tools = row["tools"]
    if isinstance(raw_tools, str):
        raw_tools = _object(raw_tools, "'tools'", "list") if raw_tools.strip() else []
    tools = [
        _object(tool, f"tools[{index}]") if isinstance(tool, str) else tool
        for index, tool in enumerate(_list(raw_tools, "tools"))
    ]
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise UnreadableRecord(f"has tools[{index}] that is {kind_of(tool)}, not an object", "write a JSON schema")
    return tuple(tools) or None


def _list(value: Any, key: str) -> list[Any]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise UnreadableRecord(f"has {key!r} that is {kind_of(value)}, not a list", "write a list")
    return list(value)


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise UnreadableRecord(f"has {key!r} that is {kind_of(value)}, not text", "write a string")
    return value


def _num_common(first: Sequence[Message], second: Sequence[Message]) -> int:
    """Number of common first messages, up to the last one that is not an answer."""
    num_common = 0
    for index, (first_message, second_message) in enumerate(zip(first, second, strict=False)):
        if first_message != second_message:
            break
        if first_message["role"] != ASSISTANT:
            num_common = index + 1
    return num_common


def require_answer(conversation: Conversation, key: str | None = None) -> Conversation:
    """The same conversation. Raises UnreadableRecord if it has no answer to learn."""
    if conversation.first_answer == len(conversation.messages):
        rule = f"{'has' if key is None else f'has a {key!r} with'} no message of the role {ASSISTANT}"
        if any(message["role"] == ASSISTANT for message in conversation.messages[conversation.num_given :]):
            rule += " with a weight other than 0"
        raise UnreadableRecord(f"{rule}, the only role that is learned", "remove the record")
    return conversation


def _is_missing(row: Mapping[str, Any], key: str) -> bool:
    return row.get(key) is None


def _describe_keys(row: Mapping[str, Any]) -> str:
    keys = [key for key, value in row.items() if value is not None]
    return f"the keys {', '.join(map(repr, keys[:8]))}"[:200] if keys else "no keys"

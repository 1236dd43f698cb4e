"""Thoughts of an answer, i.e. the reasoning before it, under the keys that records and templates use."""

from moe.data.conversations.conversation import Message

NAMES = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message, by precedence. They are synonyms: transformers fills one from another."""
_CLOSE = "</think>"


def with_thoughts(message: Message) -> Message:
    """The message with its thoughts, if any, under every key that a template may read."""
    texts = {name: message[name] for name in NAMES if message.get(name) is not None}
    if not texts:
        return message
    thoughts = next((text for text in texts.values() if text.strip()), "")
    nonempty = {name: text for name, text in texts.items() if text.strip()}
    return {**message, **dict.fromkeys(NAMES, thoughts), **nonempty, NAMES[0]: thoughts}


def without_thoughts(message: Message) -> Message:
    """The message without its thoughts."""
    fields = {name: value for name, value in message.items() if name not in NAMES}
    return {**fields, "content": split_thoughts(message)[1]}


def split_thoughts(message: Message) -> tuple[str, str]:
    """(thoughts, spoken content) of a message; thoughts between tags in the content are split off."""
    content = message["content"]
    texts = [str(message[name]) for name in NAMES if message.get(name) is not None]
    if texts:
        return next((text for text in texts if text.strip()), ""), content
    thoughts, closes, rest = content.partition(_CLOSE)
    if not closes:
        return "", content
    return thoughts.rpartition("<think>")[2].strip("\n"), rest.lstrip("\n")

"""Thoughts of an answer: what a model reasons before it speaks, under the names that records and templates have."""

from moe.data.conversations.conversation import Message

NAMES = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message, by precedence. They are one thing to transformers, which fills one from another."""
_CLOSE = "</think>"


def with_thoughts(message: Message) -> Message:
    """A message whose thoughts, where it has any, stand under every name that a template may read."""
    thoughts = next((message[name] for name in NAMES if message.get(name) is not None), None)
    if thoughts is None:
        return message
    return {"thinking": thoughts, "reasoning": thoughts, **message, NAMES[0]: thoughts}


def without_thoughts(message: Message) -> Message:
    """A message that only speaks."""
    said = {name: value for name, value in message.items() if name not in NAMES}
    return {**said, "content": parted(message)[1]}


def parted(message: Message) -> tuple[str, str]:
    """(thoughts, what is said), also of a message that has its thoughts between tags in its content."""
    content = message["content"]
    for name in NAMES:
        if message.get(name) is not None:
            return str(message[name]), content
    thoughts, closes, said = content.partition(_CLOSE)
    if not closes:
        return "", content
    return thoughts.rpartition("<think>")[2].strip("\n"), said.lstrip("\n")

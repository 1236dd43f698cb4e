"""Records of unpaired preferences (KTO): an answer with a label, or a pair, which becomes two labelled answers.

The keys are TRL's `label` and LLaMA-Factory's `kto_tag`: true for a desirable answer, false for an undesirable one.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from moe.data.conversations.conversation import ASSISTANT, Conversation, UnreadableRecord
from moe.data.conversations.records import (
    LABELS,
    PAIR,
    answer_key,
    answer_messages,
    conversation_of,
    pair_of,
    require_answer,
)
from moe.data.json_lines import kind_of


class LabelledConversation(NamedTuple):
    conversation: Conversation
    """Only its last answer is learned."""
    is_desirable: bool


def is_pair(row: Mapping[str, Any]) -> bool:
    """Whether a record is a pair of answers. Raises UnreadableRecord for a record with keys of both kinds, or
    of neither."""
    label_keys = [key for key in LABELS if row.get(key) is not None]
    pair_keys = [key for key in PAIR if row.get(key) is not None]
    if label_keys and pair_keys:
        rule = f"has both {label_keys[0]!r} and {pair_keys[0]!r}"
        raise UnreadableRecord(rule, "give one answer with a label, or chosen and rejected without one")
    if not label_keys and not pair_keys:
        rule = f"has neither {LABELS[0]!r} nor {' and '.join(map(repr, PAIR))}"
        raise UnreadableRecord(rule, "add label: true for a desirable answer, label: false for an undesirable one")
    return bool(pair_keys)


def labelled_of(row: Mapping[str, Any]) -> tuple[LabelledConversation, ...]:
    """The labelled answers of a record: one, or both of a pair, the desirable one first. Raises UnreadableRecord."""
    if is_pair(row):
        chosen, rejected = pair_of(row)
        return LabelledConversation(chosen, True), LabelledConversation(rejected, False)
    is_desirable = _label(row)
    fields = {key: value for key, value in row.items() if key not in LABELS}
    conversation, key = conversation_of(fields), answer_key(fields)
    messages = conversation.messages
    if key is not None:
        num_prompt = len(messages) - len(answer_messages(fields[key], key))
    else:
        roles = [message["role"] for message in messages]
        num_prompt = next(
            (index + 1 for index in range(len(roles) - 1, -1, -1) if roles[index] not in _ANSWER_ROLES), 0
        )
    return (LabelledConversation(require_answer(replace(conversation, num_given=num_prompt)), is_desirable),)


_ANSWER_ROLES = (ASSISTANT, "tool", "function", "ipython", "environment")
"""Roles of an answer's messages: the assistant's, and results of its calls."""


def _label(row: Mapping[str, Any]) -> bool:
    labels = {key: row[key] for key in LABELS if row.get(key) is not None}
    for key, label in labels.items():
        if not isinstance(label, bool):
            raise UnreadableRecord(f"has {key!r} that is {kind_of(label)}, not true or false", "write true or false")
    if len(set(labels.values())) > 1:
        raise UnreadableRecord(f"has {' and '.join(map(repr, labels))} that differ", "omit one of them")
    return next(iter(labels.values()))

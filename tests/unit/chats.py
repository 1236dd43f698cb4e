"""Chat templates with the structures of published ones, each with a plain Python reading; random conversations; and a
tokenizer with their special tokens."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
OTHER = {"role": "assistant", "content": "b"}
"""Messages of tests."""
DATE = date(2026, 3, 9)


class FixedDay(datetime):
    """A `datetime` whose current day is DATE."""

    @classmethod
    def now(cls, tz: Any = None) -> "FixedDay":
        return cls(DATE.year, DATE.month, DATE.day, tzinfo=tz)


Pieces = list[tuple[str, bool]]
"""Pieces of text in order, and whether each is learned."""
SPECIAL = (
    "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>", "<|User|>", "<|Assistant|>", "<|start|>", "<|channel|>",
    "<|message|>", "<|end|>", "<|return|>", "<|call|>",
)  # fmt: skip
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a place.", "parameters": {
        "type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}},
}  # fmt: skip


@dataclass(frozen=True)
class Structure:
    """A chat template, and a function that renders the same text without it."""

    source: str
    read: Callable[[Sequence[dict[str, Any]], Sequence[Any] | None], Pieces]
    takes_tools: bool = False


_CHATML = """
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- '# Tools\\n' }}{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'system' and loop.first %}{% continue %}{% endif %}
{%- if message.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + message.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' }}BEGIN
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}END{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def _chatml(messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None) -> Pieces:
    pieces: Pieces = []
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    if tools:
        head = "" if system is None else system + "\n\n"
        tool_lines = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        pieces.append((f"<|im_start|>system\n{head}# Tools\n{tool_lines}<|im_end|>\n", False))
    elif system is not None:
        pieces.append((f"<|im_start|>system\n{system}<|im_end|>\n", False))
    for message in messages[system is not None :]:
        if message["role"] == "tool":
            text = f"<|im_start|>user\n<tool_response>\n{message['content']}\n</tool_response><|im_end|>\n"
            pieces.append((text, False))
            continue
        text = message["content"]
        for call in message.get("tool_calls", ()):
            text += f"\n<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        pieces += [(f"<|im_start|>{message['role']}\n", False), (f"{text}<|im_end|>\n", message["role"] == "assistant")]
    return pieces


_LLAMA = """{{- bos_token }}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + strftime_now('%d %b %Y') + '\\n\\n' }}
{%- if messages[0]['role'] == 'system' %}{{ messages[0]['content'] | trim }}{% set messages = messages[1:] %}{% endif %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""


def _llama(messages: Sequence[dict[str, Any]], _tools: object) -> Pieces:
    head = f"<s><|start_header_id|>system<|end_header_id|>\n\nToday: {DATE.strftime('%d %b %Y')}\n\n"
    if messages[0]["role"] == "system":
        head, messages = head + messages[0]["content"].strip(), messages[1:]
    pieces: Pieces = [(head + "<|eot_id|>", False)]
    for message in messages:
        pieces.append((f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n", False))
        pieces.append((message["content"].strip() + "<|eot_id|>", message["role"] == "assistant"))
    return pieces


def _with_marks(source: str) -> str:
    begin = "{% if message.role == 'assistant' %}{% generation %}"
    inner, rest = source.split("BEGIN")[1].split("END", 1)
    plain = f"{{% else %}}{inner}{{% endif %}}"
    return source.split("BEGIN")[0] + begin + inner + "{% endgeneration %}" + plain + rest


TAKES_TURNS = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ '[assistant]' if add_generation_prompt }}"
)
"""A template that refuses two messages of one role in a row."""
STRUCTURES = {
    "chatml": Structure(_CHATML.replace("BEGIN", "").replace("END", ""), _chatml, takes_tools=True),
    "chatml, marked": Structure(_with_marks(_CHATML), _chatml, takes_tools=True),
    "llama": Structure(_LLAMA, _llama),
}


def conversation(rng: random.Random, structure: Structure) -> dict[str, Any]:
    """A random record."""
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": some_text(rng)})
    has_tools = structure.takes_tools and rng.random() < 0.5
    for _ in range(rng.randrange(1, 4)):
        messages.append({"role": "user", "content": some_text(rng)})
        if has_tools and rng.random() < 0.5:
            call = {"type": "function", "function": {"name": "weather", "arguments": {"place": some_text(rng)}}}
            messages.append({"role": "assistant", "content": some_text(rng), "tool_calls": [call]})
            messages.append({"role": "tool", "content": some_text(rng)})
        messages.append({"role": "assistant", "content": some_text(rng)})
    return {"messages": messages, **({"tools": [WEATHER]} if has_tools else {})}


WORDS = (
    "the", "Sun", "größer", "日本", "👩‍👩‍👧", "x\n", "\n\n", "  y", "<|im_end|>", "</s>", "{{ 1 }}", "'", '"q"',
)  # fmt: skip


def some_text(rng: random.Random, words: Sequence[str] = WORDS) -> str:
    """A few random words."""
    text = " ".join(rng.choice(words) for _ in range(rng.randrange(1, 9)))
    return text if text.strip() else "well"


LICENSE = Path(__file__).parents[2] / "LICENSE"
"""Text that never changes."""


@cache
def tokenizer_json() -> str:
    """A byte-level tokenizer of some 500 ids."""
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator([LICENSE.read_text()], trainer)
    return str(bpe.to_str())


def tokenizer_files(source: str, *, in_config: bool = False) -> dict[str, bytes]:
    """Files of a folder's tokenizer, with a chat template."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>"},
        "pad_token": "<pad>", "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    if in_config:
        config["chat_template"] = source
    files = {"tokenizer.json": tokenizer_json().encode(), "tokenizer_config.json": json.dumps(config).encode()}
    return files if in_config else {**files, "chat_template.jinja": source.encode()}

"""Chat templates with the structures of published ones, each with a plain reading of its own; conversations by
chance; and a tokenizer that has their special tokens."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
OTHER = {"role": "assistant", "content": "b"}
"""Messages of tests."""
DATE = date(2026, 3, 9)
Pieces = list[tuple[str, bool]]
"""Text in order, and whether it is learned."""
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
    """A template, and how it is read without one."""

    source: str
    read: Callable[[Sequence[dict[str, Any]], Sequence[Any] | None], Pieces]
    takes_tools: bool = False
    takes_system: bool = True


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
    found: Pieces = []
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    if tools:
        head = "" if system is None else system + "\n\n"
        listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        found.append((f"<|im_start|>system\n{head}# Tools\n{listed}<|im_end|>\n", False))
    elif system is not None:
        found.append((f"<|im_start|>system\n{system}<|im_end|>\n", False))
    for message in messages[system is not None :]:
        if message["role"] == "tool":
            said = f"<|im_start|>user\n<tool_response>\n{message['content']}\n</tool_response><|im_end|>\n"
            found.append((said, False))
            continue
        said = message["content"]
        for call in message.get("tool_calls", ()):
            said += f"\n<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        found += [(f"<|im_start|>{message['role']}\n", False), (f"{said}<|im_end|>\n", message["role"] == "assistant")]
    return found


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
    found: Pieces = [(head + "<|eot_id|>", False)]
    for message in messages:
        found.append((f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n", False))
        found.append((message["content"].strip() + "<|eot_id|>", message["role"] == "assistant"))
    return found


_MISTRAL = """{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content + '\\n\\n' %}{% set rest = messages[1:] %}
{%- else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{%- for message in rest %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must take turns') }}
{%- elif message.role == 'user' %}{{ '[INST] ' + (system if loop.first else '') + message.content + ' [/INST]' }}
{%- else %}{{ ' ' + message.content + eos_token }}{% endif %}
{%- endfor %}"""


def _mistral(messages: Sequence[dict[str, Any]], _tools: object) -> Pieces:
    system = ""
    if messages[0]["role"] == "system":
        system, messages = messages[0]["content"] + "\n\n", messages[1:]
    found: Pieces = [("<s>", False)]
    for at, message in enumerate(messages):
        if message["role"] == "user":
            found.append((f"[INST] {system if at == 0 else ''}{message['content']} [/INST]", False))
        else:
            found.append((f" {message['content']}</s>", True))
    return found


_GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- for message in messages %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""


def _gemma(messages: Sequence[dict[str, Any]], _tools: object) -> Pieces:
    found: Pieces = [("<s>", False)]
    for message in messages:
        is_answer = message["role"] == "assistant"
        found.append((f"<start_of_turn>{'model' if is_answer else message['role']}\n", False))
        found.append((message["content"].strip() + "<end_of_turn>\n", is_answer))
    return found


_DEEPSEEK = """{%- set found = namespace(system='') %}
{%- for message in messages if message.role == 'system' %}
{%- set found.system = found.system + message.content %}{% endfor %}
{{- bos_token + found.system }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<|User|>' + message.content }}
{%- elif message.role == 'assistant' %}{{ '<|Assistant|>' }}{{ message.content + eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"""


def _deepseek(messages: Sequence[dict[str, Any]], _tools: object) -> Pieces:
    found: Pieces = [("<s>" + "".join(each["content"] for each in messages if each["role"] == "system"), False)]
    for message in messages:
        if message["role"] == "user":
            found.append((f"<|User|>{message['content']}", False))
        elif message["role"] == "assistant":
            found += [("<|Assistant|>", False), (message["content"] + "</s>", True)]
    return found


# Two stretches of an answer are marked, and what stands between them is not.
_HARMONY = """{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- if message.thinking %}{{ '<|start|>assistant' }}{% generation %}
{{- '<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{% endgeneration %}{% endif %}
{{- '<|start|>assistant' }}{% generation %}{{ '<|channel|>final<|message|>' + message.content }}
{{- '<|return|>' }}{% endgeneration %}
{%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""


def _harmony(messages: Sequence[dict[str, Any]], _tools: object) -> Pieces:
    found: Pieces = []
    for message in messages:
        if message["role"] != "assistant":
            found.append((f"<|start|>{message['role']}<|message|>{message['content']}<|end|>", False))
            continue
        if message.get("thinking"):
            thought = f"<|channel|>analysis<|message|>{message['thinking']}<|end|>"
            found += [("<|start|>assistant", False), (thought, True)]
        answer = f"<|channel|>final<|message|>{message['content']}<|return|>"
        found += [("<|start|>assistant", False), (answer, True)]
    return found


def _marked(source: str) -> str:
    begin = "{% if message.role == 'assistant' %}{% generation %}"
    inner, rest = source.split("BEGIN")[1].split("END", 1)
    plain = f"{{% else %}}{inner}{{% endif %}}"
    return source.split("BEGIN")[0] + begin + inner + "{% endgeneration %}" + plain + rest


STRUCTURES = {
    "chatml": Structure(_CHATML.replace("BEGIN", "").replace("END", ""), _chatml, takes_tools=True),
    "chatml, marked": Structure(_marked(_CHATML), _chatml, takes_tools=True),
    "llama": Structure(_LLAMA, _llama),
    "mistral": Structure(_MISTRAL, _mistral),
    "gemma": Structure(_GEMMA, _gemma, takes_system=False),
    "deepseek": Structure(_DEEPSEEK, _deepseek),
    "harmony, marked": Structure(_HARMONY, _harmony),
}


def conversation(rng: random.Random, structure: Structure) -> dict[str, Any]:
    """A record by chance."""
    messages: list[dict[str, Any]] = []
    if structure.takes_system and rng.random() < 0.5:
        messages.append({"role": "system", "content": _said(rng)})
    has_tools = structure.takes_tools and rng.random() < 0.5
    for _ in range(rng.randrange(1, 4)):
        messages.append({"role": "user", "content": _said(rng)})
        if has_tools and rng.random() < 0.5:
            call = {"type": "function", "function": {"name": "weather", "arguments": {"place": _said(rng)}}}
            messages.append({"role": "assistant", "content": _said(rng), "tool_calls": [call]})
            messages.append({"role": "tool", "content": _said(rng)})
        messages.append({"role": "assistant", "content": _said(rng)})
        if "thinking" in structure.source and rng.random() < 0.5:
            messages[-1]["thinking"] = _said(rng)
    return {"messages": messages, **({"tools": [WEATHER]} if has_tools else {})}


def _said(rng: random.Random) -> str:
    words = (
        "the", "Sun", "größer", "日本", "👩‍👩‍👧", "x\n", "\n\n", "  y", "<|im_end|>", "</s>", "{{ 1 }}", "'", '"q"',
    )  # fmt: skip
    said = " ".join(rng.choice(words) for _ in range(rng.randrange(1, 9)))
    return said if said.strip() else "well"


LICENSE = Path(__file__).parents[2] / "LICENSE"
"""Text that stays as it is."""


@cache
def tokenizer_json() -> str:
    """A byte-level tokenizer of some 500 ids."""
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    texts = [LICENSE.read_text()]
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
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

"""Special tokens by their roles, as named in the files next to a `tokenizer.json`."""

import json
from collections.abc import Mapping
from typing import Any

TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP = "tokenizer_config.json", "special_tokens_map.json"


def start_token(files: Mapping[str, bytes]) -> str | None:
    """Token before a text that nothing precedes: BOS, or EOS if the tokenizer has no BOS, as in lm-evaluation-harness.
    None if the files name neither."""
    tokens = named_tokens(files)
    return tokens.get("bos_token") or tokens.get("eos_token")


def named_tokens(files: Mapping[str, bytes]) -> dict[str, str]:
    """Tokens by role (`bos_token`, `eos_token`, ...). As in transformers, `special_tokens_map.json` takes precedence,
    unless `tokenizer_config.json` has `added_tokens_decoder`: then it is ignored."""
    config = json_object(files, TOKENIZER_CONFIG)
    if "added_tokens_decoder" not in config:
        config = {**config, **json_object(files, SPECIAL_TOKENS_MAP)}
    return contents_by_role(config)


def contents_by_role(config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the tokens among the fields of a tokenizer's config."""
    contents = {role: content_of(token) for role, token in config.items() if role.endswith("_token")}
    return {role: content for role, content in contents.items() if content is not None}


def content_of(token: Any) -> str | None:
    """Text of a token that is written as a string, or as an object with its `content`."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def json_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Object in a JSON file; empty if there is no such file, or no object in it."""
    try:
        value = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}

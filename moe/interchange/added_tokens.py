"""Tokens that files next to a `tokenizer.json` add to its vocabulary, as transformers reads them.

`tokenizer_config.json` may name tokens (`added_tokens_decoder`, `bos_token`, `extra_special_tokens`, ...) that
`tokenizer.json` lacks, or whose flags differ there; older folders have `added_tokens.json` and
`special_tokens_map.json` instead. transformers adds them when it loads the folder. Here they are written into
`tokenizer.json`, so that tools that read only that file have the same tokens.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from moe.data.special_tokens import SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG
from moe.spec import spec_error

ADDED_TOKENS = "added_tokens.json"
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Roles of every tokenizer, in the order in which transformers adds their tokens; a model's own roles follow."""
_Token = dict[str, Any]


def with_added_tokens(tokenizer: bytes, other_files: Mapping[str, bytes], place: str) -> bytes:
    """Return a `tokenizer.json` with the tokens that `other_files` of its folder add; the same bytes if they add none.

    Raises SpecError if a token's declared id differs from its id in `tokenizer.json`.
    """
    if not other_files.keys() & {TOKENIZER_CONFIG, ADDED_TOKENS, SPECIAL_TOKENS_MAP}:
        return tokenizer
    content = _object(tokenizer)
    vocabulary = _Vocabulary.from_content(content)
    if vocabulary is None:
        return tokenizer  # the fault is reported when the file is loaded
    declarations = _TokenDeclarations(other_files, vocabulary, place)
    original_tokens = vocabulary.tokens_in_order
    for token in list(declarations.tokens(vocabulary)):
        vocabulary.add(token)
    for file, id, text in declarations.ids:
        if text and (actual_id := vocabulary.ids.get(text)) != id:
            rule = f"has the id {id} here but {actual_id} in tokenizer.json"
            remedy = "download both files again"
            raise spec_error("conflict", f"{place}/{file}", text, rule, remedy)
    if vocabulary.tokens_in_order == original_tokens:
        return tokenizer
    return json.dumps({**content, "added_tokens": vocabulary.tokens_in_order}).encode()


class _Vocabulary:
    """Token ids of a tokenizer, assigned as the tokenizers library assigns them."""

    def __init__(self, ids: dict[str, int], num_model_tokens: int) -> None:
        self.ids = ids
        self._by_text: dict[str, _Token] = {}
        self._num_model_tokens, self._highest_added = num_model_tokens, -1

    @property
    def tokens_in_order(self) -> list[_Token]:
        """Added tokens in the order of `tokenizer.json`."""
        return list(self._by_text.values())

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> "_Vocabulary | None":
        """Vocabulary of a `tokenizer.json`; None if it has no readable one."""
        model, added_tokens = content.get("model"), content.get("added_tokens")
        entries = model.get("vocab") if isinstance(model, dict) else None
        if isinstance(entries, list):  # Unigram: [token, score]
            entries = {str(entry[0]): id for id, entry in enumerate(entries) if isinstance(entry, list) and entry}
        if not isinstance(entries, dict) or not isinstance(added_tokens, list):
            return None
        if not all(type(id) is int for id in entries.values()):
            return None
        vocabulary = cls(dict(entries), len(entries))
        for token in added_tokens:
            if not isinstance(token, dict) or not isinstance(token.get("content"), str):
                return None
            vocabulary.add(token)
        return vocabulary

    def add(self, token: _Token) -> None:
        """Add a token, or replace the one with the same text, which keeps its id."""
        text = token["content"]
        if text not in self.ids:
            self.ids[text] = max(self._highest_added + 1, self._num_model_tokens)
        id = self.ids[text]
        self._highest_added = max(self._highest_added, id)
        self._by_text[text] = {"id": id, **{key: value for key, value in _with_all_flags(token).items() if key != "id"}}


class _TokenDeclarations:
    """Tokens declared by other files of a tokenizer's folder."""

    def __init__(self, other_files: Mapping[str, bytes], vocabulary: _Vocabulary, place: str) -> None:
        config = _object(other_files.get(TOKENIZER_CONFIG, b"{}"))
        self._by_id: dict[int, _Token] = {}
        self.ids: list[tuple[str, int, str]] = []
        """(file, id, text) of tokens with a declared id."""
        if "added_tokens_decoder" in config:
            self._config = config
            for id, token in _entries(config["added_tokens_decoder"], f"{place}/{TOKENIZER_CONFIG}"):
                self._by_id[id] = token
                self.ids.append((TOKENIZER_CONFIG, id, token["content"]))
        else:
            by_role = _object(other_files.get(SPECIAL_TOKENS_MAP, b"{}"))
            self._config = {**config, **by_role}
            # transformers compares texts here before the objects of tokenizer_config.json become tokens.
            plain = {role: value for role, value in config.items() if isinstance(value, str)}
            special = {_text_of({**plain, **by_role}.get(role)) for role in _ROLES}
            special.update(value for value in self._extra() if isinstance(value, str))
            for text, id in _object(other_files.get(ADDED_TOKENS, b"{}")).items():
                if type(id) is int:  # excludes bool
                    self._by_id[id] = _with_all_flags(_token(text, special=text in special))
                    self.ids.append((ADDED_TOKENS, id, text))
            self._by_id.update({token["id"]: token for token in vocabulary.tokens_in_order})

    def tokens(self, vocabulary: _Vocabulary) -> Iterator[_Token]:
        """Yield tokens to add or replace: first those with an id, then those with only a role."""
        tokens_by_role = {role: token for role, token in self._roles().items() if token}
        role_texts = {_text_of(token) for token in tokens_by_role.values()}
        texts = {token["content"] for token in vocabulary.tokens_in_order}
        for _, token in sorted(self._by_id.items()):
            if token["content"]:
                texts.add(token["content"])
                yield _as_special(token) if token["content"] in role_texts else token
        seen_texts = set[str]()
        for value in (*tokens_by_role.values(), *self._extra()):
            text = _text_of(value)
            if not text or text in texts or (isinstance(value, str) and value in seen_texts):
                continue
            if isinstance(value, str):
                seen_texts.add(value)
            token = _token(value, special=True) if isinstance(value, str) else _token(value)
            yield _as_special(token) if text in role_texts else token

    def _roles(self) -> dict[str, Any]:
        """Tokens by role: first the roles of every tokenizer, then the model's own."""
        model_roles = {
            key: value
            for key, value in self._config.items()
            if key.endswith("_token") and key not in _ROLES and _text_of(value) is not None
        }
        extra = self._config.get("extra_special_tokens")
        if isinstance(extra, dict):
            model_roles.update({key: value for key, value in extra.items() if _text_of(value) is not None})
        return {**{role: self._config.get(role) for role in _ROLES}, **model_roles}

    def _extra(self) -> list[Any]:
        """Special tokens without a role."""
        extra = self._config.get("extra_special_tokens") or self._config.get("additional_special_tokens")
        return [value for value in extra if _text_of(value) is not None] if isinstance(extra, list) else []


def _entries(decoder: Any, place: str) -> Iterable[tuple[int, _Token]]:
    if not isinstance(decoder, dict):
        raise spec_error("wrong_type", place, None, "has an added_tokens_decoder that is not an object", "correct it")
    for key, value in decoder.items():
        if not key.isdecimal() or not isinstance(value, dict) or not isinstance(value.get("content"), str):
            rule = "must be a token id with an object that has its content"
            raise spec_error("wrong_type", f"{place}:added_tokens_decoder", key, rule, "correct it")
        yield int(key), _token(value)


def _token(value: Any, special: bool = False) -> _Token:
    """A token as declared; `normalized` only if declared."""
    fields = {"content": value, "special": special} if isinstance(value, str) else value
    special = bool(fields.get("special", special))
    flags = {name: bool(fields.get(name, False)) for name in ("single_word", "lstrip", "rstrip")}
    token = {"content": fields["content"], **flags, "special": special}
    if "normalized" in fields:
        token["normalized"] = bool(fields["normalized"])
    return token


def _as_special(token: _Token) -> _Token:
    return {**token, "special": True}


def _with_all_flags(token: _Token) -> _Token:
    """Token with all flags set. By default, ordinary tokens match normalized text and special tokens do not."""
    defaults = {"single_word": False, "lstrip": False, "rstrip": False, "special": False}
    return {**defaults, "normalized": not token.get("special", False), **token}


def _text_of(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _object(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}

"""Tokens that files beside a `tokenizer.json` add to its vocabulary, as the library transformers reads them.

`tokenizer_config.json` may name tokens (`added_tokens_decoder`, `bos_token`, `extra_special_tokens`, ...) that
`tokenizer.json` lacks, or whose flags differ there; older folders have `added_tokens.json` and
`special_tokens_map.json` in its place. transformers adds them when it loads the folder. Here they are written into
`tokenizer.json`, so that whatever reads that file alone has the same tokens.
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


def with_added_tokens(tokenizer: bytes, beside: Mapping[str, bytes], place: str) -> bytes:
    """A `tokenizer.json` with the tokens that the files `beside` it add; the same bytes where they add none.

    Raises SpecError where a token's declared id is not the one that it has in `tokenizer.json`, or gets there.
    """
    if not beside.keys() & {TOKENIZER_CONFIG, ADDED_TOKENS, SPECIAL_TOKENS_MAP}:
        return tokenizer
    content = _object(tokenizer)
    vocabulary = _Vocabulary.from_content(content)
    if vocabulary is None:
        return tokenizer  # what is wrong with it is found when it is tried
    declarations = _TokenDeclarations(beside, vocabulary, place)
    before = vocabulary.tokens_in_order
    for token in list(declarations.tokens(vocabulary)):
        vocabulary.add(token)
    for file, id, text in declarations.ids:
        if text and (actual_id := vocabulary.ids.get(text)) != id:
            rule = f"has the id {id} here but {actual_id} in tokenizer.json"
            remedy = "download both files again"
            raise spec_error("conflict", f"{place}/{file}", text, rule, remedy)
    if vocabulary.tokens_in_order == before:
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
        """Added tokens in order, as `tokenizer.json` has them."""
        return list(self._by_text.values())

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> "_Vocabulary | None":
        """The vocabulary of a `tokenizer.json`; None where it has none that can be read."""
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
        """Add a token, or replace the one of the same text: its id stays."""
        text = token["content"]
        if text not in self.ids:
            self.ids[text] = max(self._highest_added + 1, self._num_model_tokens)
        id = self.ids[text]
        self._highest_added = max(self._highest_added, id)
        self._by_text[text] = {"id": id, **{key: value for key, value in _whole(token).items() if key != "id"}}


class _TokenDeclarations:
    """Tokens that the files beside a `tokenizer.json` name."""

    def __init__(self, beside: Mapping[str, bytes], vocabulary: _Vocabulary, place: str) -> None:
        config = _object(beside.get(TOKENIZER_CONFIG, b"{}"))
        self._by_id: dict[int, _Token] = {}
        self.ids: list[tuple[str, int, str]] = []
        """(file, id, text) of tokens whose id is declared."""
        if "added_tokens_decoder" in config:
            self._config = config
            for id, token in _entries(config["added_tokens_decoder"], f"{place}/{TOKENIZER_CONFIG}"):
                self._by_id[id] = token
                self.ids.append((TOKENIZER_CONFIG, id, token["content"]))
        else:
            by_role = _object(beside.get(SPECIAL_TOKENS_MAP, b"{}"))
            self._config = {**config, **by_role}
            # transformers compares texts here before the objects of tokenizer_config.json become tokens.
            plain = {role: value for role, value in config.items() if isinstance(value, str)}
            special = {_text_of({**plain, **by_role}.get(role)) for role in _ROLES}
            special.update(value for value in self._extra() if isinstance(value, str))
            for text, id in _object(beside.get(ADDED_TOKENS, b"{}")).items():
                if type(id) is int:  # True is none
                    self._by_id[id] = _whole(_token(text, special=text in special))
                    self.ids.append((ADDED_TOKENS, id, text))
            self._by_id.update({token["id"]: token for token in vocabulary.tokens_in_order})

    def tokens(self, vocabulary: _Vocabulary) -> Iterator[_Token]:
        """Tokens to add or to replace, in order: those with an id, then those with only a role."""
        of_roles = {role: token for role, token in self._roles().items() if token}
        role_texts = {_text_of(token) for token in of_roles.values()}
        texts = {token["content"] for token in vocabulary.tokens_in_order}
        for _, token in sorted(self._by_id.items()):
            if token["content"]:
                texts.add(token["content"])
                yield _made_special(token) if token["content"] in role_texts else token
        seen_texts = set[str]()
        for value in (*of_roles.values(), *self._extra()):
            text = _text_of(value)
            if not text or text in texts or (isinstance(value, str) and value in seen_texts):
                continue
            if isinstance(value, str):
                seen_texts.add(value)
            token = _token(value, special=True) if isinstance(value, str) else _token(value)
            yield _made_special(token) if text in role_texts else token

    def _roles(self) -> dict[str, Any]:
        """Tokens by role: those that every tokenizer has, then a model's own."""
        own = {
            key: value
            for key, value in self._config.items()
            if key.endswith("_token") and key not in _ROLES and _text_of(value) is not None
        }
        extra = self._config.get("extra_special_tokens")
        if isinstance(extra, dict):
            own.update({key: value for key, value in extra.items() if _text_of(value) is not None})
        return {**{role: self._config.get(role) for role in _ROLES}, **own}

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


def _made_special(token: _Token) -> _Token:
    return {**token, "special": True}


def _whole(token: _Token) -> _Token:
    """A token with all of its flags: by default, an ordinary token matches normalized text, a special one does not."""
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

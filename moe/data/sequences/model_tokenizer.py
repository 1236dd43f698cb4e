"""The tokenizer that a given model came with, tried in a limited process before anything else reads it: a pattern in
its file can take hours for a line, or break the library."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe.data.limited_process import LimitedProcessError, run_limited
from moe.data.special_tokens import SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG, start_token
from moe.spec import SpecError, spec_error

if TYPE_CHECKING:
    from moe.data.tokenizer import Tokenizer

TOKENIZER = "tokenizer.json"
IDS = "tokenizer.ids.json"
"""File with the ids that begin and end a document, stored with a given model's files."""
ENDS = "tokenizer.ends.json"
"""File with the ids of further tokens that stop generation, stored likewise."""
CLOSERS = "tokenizer.closers.json"
"""File with the ids of other tokens that closed answers in training, stored likewise: they stop generation, too."""
SHARDS = "stream.shards.json.gz"
"""File with the list of a stream's shards, stored likewise."""
_STORED_FILES = (IDS, ENDS, CLOSERS, SHARDS)
TOKENIZER_FILES = (TOKENIZER, IDS)
"""Files that determine a document's tokens."""
TIMEOUT_S, MEMORY_BYTES = 60.0, 6 << 30
_REMEDY = "use a tokenizer.json that the tokenizers library encodes text with"


@dataclass(frozen=True)
class ModelTokenizer:
    """Files of a model's tokenizer, as they are."""

    files: Mapping[str, bytes]
    """By name; Hugging Face's `tokenizer.json` among them."""
    eos_id: int
    """Id of the token that ends a document."""
    bos_id: int | None = None
    """Id of the token that begins one; `eos_id` where the model has none."""
    ends: tuple[int, ...] = ()
    """Ids of further tokens that stop generation: a chat model ends its turns with another token than documents."""
    place: str = "model"
    """Path in the spec, for errors."""

    def __post_init__(self) -> None:
        if TOKENIZER not in self.files or any("/" in name or name in _STORED_FILES for name in self.files):
            raise ValueError(f"a tokenizer needs {TOKENIZER}, not only {list(self.files)}")

    @classmethod
    def of_files(cls, files: Mapping[str, bytes]) -> "ModelTokenizer":
        """The tokenizer whose `all_files` these are."""
        ids, ends = json.loads(files[IDS]), json.loads(files[ENDS])
        tokenizer_files = {name: content for name, content in files.items() if name not in _STORED_FILES}
        return cls(tokenizer_files, ids["eos_id"], ids["bos_id"], tuple(ends))

    def all_files(self) -> dict[str, bytes]:
        """The files, and two with the ids, as checkpoints have them."""
        ids = {"bos_id": self.bos_id, "eos_id": self.eos_id}
        return {**self.files, IDS: json.dumps(ids).encode(), ENDS: json.dumps(self.ends).encode()}

    @property
    def all_ends(self) -> tuple[int, ...]:
        """Ids of all tokens that end a text."""
        return (self.eos_id, *self.ends)

    def token_texts(self) -> dict[int, str]:
        """Texts of the added tokens, by id, and of those that end a text."""
        tokenizer = self._plain()
        texts = {token["id"]: token["content"] for token in _added_tokens(tokenizer)}
        model = tokenizer.get("model")
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        if isinstance(vocabulary, dict) and (missing := set(self.all_ends) - texts.keys()):
            texts |= {id: text for text, id in vocabulary.items() if id in missing}
        return texts

    def end_texts(self) -> tuple[str, ...]:
        """Texts of the tokens that end a text, as far as they have one."""
        texts = self.token_texts()
        return tuple(texts[id] for id in self.all_ends if id in texts)

    def special_texts(self) -> tuple[str, ...]:
        """Texts of the special tokens."""
        return tuple(token["content"] for token in _added_tokens(self._plain()) if token.get("special"))

    def _plain(self) -> dict[str, Any]:
        try:
            value = json.loads(self.files[TOKENIZER])
        except (ValueError, RecursionError):  # told where the tokenizer is tried
            return {}
        return value if isinstance(value, dict) else {}

    def require_within(self, vocab_size: int, num_ids: int) -> None:
        """Raise SpecError unless an embedding of `vocab_size` entries covers all `num_ids` ids."""
        if num_ids > vocab_size:
            rule = f"must be at least the {num_ids} ids of the model's tokenizer"
            remedy = f"use {num_ids} or more, or another tokenizer"
            raise spec_error("out_of_range", f"{self.place}.vocab_size", vocab_size, rule, remedy)


def require_usable(tokenizer: ModelTokenizer, vocab_size: int, sample: Sequence[str]) -> None:
    """Raise SpecError unless a tokenizer encodes the `sample`, and texts that are hard for patterns, in bounded time
    and memory, to ids within an embedding of `vocab_size` entries."""
    request = {"tokenizer": tokenizer.files[TOKENIZER].decode("utf-8", "replace"), "texts": list(sample)}
    try:
        answer = run_limited(
            "moe.data.sequences.tokenizer_trial",
            json.dumps(request).encode(),
            timeout_s=TIMEOUT_S,
            memory_bytes=MEMORY_BYTES,
        )
    except LimitedProcessError as error:
        raise _refusal(tokenizer, f"{error}, encoding text") from None
    result = json.loads(answer)
    if "problem" in result:
        raise _refusal(tokenizer, result["problem"])
    num_ids = result["num_ids"]
    tokenizer.require_within(vocab_size, num_ids)
    for name in ("eos_id", "bos_id"):
        id = getattr(tokenizer, name)
        if id is not None and not 0 <= id < num_ids:
            raise _refusal(tokenizer, f"has {num_ids} ids, which do not include {name} {id}")


def _added_tokens(tokenizer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Added tokens of a `tokenizer.json` that have an id and content."""
    tokens = tokenizer.get("added_tokens")
    return [
        token
        for token in (tokens if isinstance(tokens, list) else ())
        if isinstance(token, dict) and isinstance(token.get("id"), int) and token.get("content")
    ]


def load_tokenizer(read: Callable[[str], bytes]) -> "Tokenizer":
    """The tokenizer of documents from the files that `PreparedSequences.tokenizer_files` gives, which `read` gives by
    name. Raises FileNotFoundError, and ValueError for what cannot be read."""
    from moe.data.tokenizer import TextForm, Tokenizer

    text = read(TOKENIZER).decode("utf-8")
    try:
        ids = json.loads(read(IDS))
    except FileNotFoundError:
        return Tokenizer.from_json(text, TextForm.DOCUMENTS)
    model_files = dict[str, bytes]()
    for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP):
        with suppress(FileNotFoundError):
            model_files[name] = read(name)
    return Tokenizer.of_model(text, bos_id=ids["bos_id"], eos_id=ids["eos_id"], start_token=start_token(model_files))


def _refusal(tokenizer: ModelTokenizer, rule: str) -> SpecError:
    return spec_error("unsupported", f"{tokenizer.place}.tokenizer", TOKENIZER, rule, _REMEDY)

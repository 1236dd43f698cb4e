"""Tokenizers of folders: `tokenizer.json`, or converted from a tiktoken file, which Kimi's models have instead.

The `tokenizers` library cannot read tiktoken files, so they are converted here. In each word that its pattern finds,
tiktoken repeatedly merges the two neighbours whose concatenation has the lowest rank, until none is a token; a word
that is a token itself is used whole. BPE is equivalent if its merges are all pairs of tokens whose concatenation is a
token, in order of that token's rank.
"""

import base64
import binascii
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from moe.data.special_tokens import SPECIAL_TOKENS_MAP
from moe.interchange.added_tokens import ADDED_TOKENS, with_added_tokens
from moe.interchange.hub_folder import MAX_CONFIG_BYTES, HubFolder
from moe.spec import spec_error
from moe.storage.folder import MAX_READ_BYTES

JSON, CONFIG, TIKTOKEN = "tokenizer.json", "tokenizer_config.json", "tiktoken.model"
_HAN, _UPPER, _LOWER = r"\p{Han}", r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join((
    rf"[{_HAN}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}&&[^{_HAN}]]*[{_LOWER}&&[^{_HAN}]]+{_CONTRACTIONS}",
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}&&[^{_HAN}]]+[{_LOWER}&&[^{_HAN}]]*{_CONTRACTIONS}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
))  # fmt: skip
"""Word pattern of Kimi K2 and Moonlight, from their folders' Python code, which is never run."""
MAX_TOKEN_BYTES = 512
"""Maximum token length, four times that in published files: the search for merges tries every split of a token."""
NUM_SPECIAL = 256
"""Special tokens after those of the file; those without a name in tokenizer_config.json are reserved."""


def tokenizer_json(url: str, roots: Sequence[str] | None = None) -> bytes:
    """Return a folder's `tokenizer.json`, or convert its tiktoken file. Raises SpecError."""
    folder = HubFolder(url, roots)
    names = (JSON, TIKTOKEN, CONFIG, ADDED_TOKENS, SPECIAL_TOKENS_MAP)
    files = {
        name: folder.read(name, MAX_READ_BYTES if name in (JSON, TIKTOKEN) else MAX_CONFIG_BYTES)
        for name in names
        if folder.has(name)
    }
    exported_files = export_tokenizer(files, folder.url)
    if JSON not in exported_files:
        raise spec_error("not_found", folder.place, folder.url, f"has neither {JSON} nor {TIKTOKEN}",
                         "add the model's tokenizer")  # fmt: skip
    return exported_files[JSON]


def export_tokenizer(files: Mapping[str, bytes], place: str = "model.from") -> dict[str, bytes]:
    """Return a folder's tokenizer files, with a `tokenizer.json` that needs no Python code and includes the tokens
    declared in other files. Raises SpecError."""
    exported_files = dict(files)
    if JSON in files:
        exported_files[JSON] = with_added_tokens(files[JSON], files, place)
    converts = TIKTOKEN in files and JSON not in files
    if not converts and CONFIG not in files:
        return exported_files
    config = _object(files.get(CONFIG, b"{}"), f"{place}/{CONFIG}")
    if not converts and "auto_map" not in config:
        return exported_files
    plain_config = {key: value for key, value in config.items() if key != "auto_map"}
    if converts or JSON in files:
        plain_config["tokenizer_class"] = "PreTrainedTokenizerFast"
    exported_files[CONFIG] = (json.dumps(plain_config, indent=2) + "\n").encode()
    if not converts:
        return exported_files
    try:
        exported_files[JSON] = of_tiktoken(exported_files.pop(TIKTOKEN), special_tokens(config)).encode()
    except ValueError as error:
        raise spec_error("invalid_syntax", f"{place}/{TIKTOKEN}", None, f"is not a valid tiktoken file: {error}",
                         "use the model's original file") from None  # fmt: skip
    return exported_files


def _object(content: bytes, place: str) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise spec_error("invalid_syntax", place, None, f"is not valid JSON: {error}", "correct it") from None
    return value if isinstance(value, dict) else {}


def special_tokens(config: Mapping[str, Any]) -> dict[int, str]:
    """Special tokens that a `tokenizer_config.json` names, by id."""
    added_tokens = config.get("added_tokens_decoder")
    entries = added_tokens.items() if isinstance(added_tokens, dict) else ()
    return {
        int(number): str(entry["content"])
        for number, entry in entries
        if number.isdecimal() and isinstance(entry, dict) and "content" in entry
    }


def ranks_of(content: bytes) -> dict[bytes, int]:
    """Tokens of a tiktoken file with their ranks, which are their ids. Raises ValueError with the line if the file is
    invalid."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token_base64, rank = line.split()
            token = base64.b64decode(token_base64, validate=True)
            ranks[token] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f"line {number} is not a token in base64 and its rank") from None
        if len(token) > MAX_TOKEN_BYTES:
            raise ValueError(f"line {number} is a token of {len(token):,} bytes; the limit is {MAX_TOKEN_BYTES}")
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise ValueError("its ranks must number tokens from 0 and include all single bytes")
    return ranks


def of_tiktoken(content: bytes, special: Mapping[int, str], pattern: str = PATTERN) -> str:
    """Convert a tiktoken file, with special tokens by id, to a `tokenizer.json`. Raises ValueError."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    ranks = ranks_of(content)
    vocabulary = {_text(token): rank for token, rank in ranks.items()}
    merges = [(_text(left), _text(right)) for left, right in _merges(ranks)]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    first = len(ranks)
    names = [special.get(token_id, f"<|reserved_token_{token_id}|>") for token_id in range(first, first + NUM_SPECIAL)]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    return str(tokenizer.to_str())


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Yield all pairs of tokens whose concatenation is a token, in order of that token's rank."""
    for token, _ in sorted(ranks.items(), key=lambda token_and_rank: token_and_rank[1]):
        pairs = ((token[:index], token[index:]) for index in range(1, len(token)))
        known_pairs = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        yield from sorted(known_pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


@cache
def _characters() -> dict[int, str]:
    """Printable character for each byte in byte-level BPE (GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    other_bytes = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(other_bytes)}


def _text(token: bytes) -> str:
    return "".join(_characters()[byte] for byte in token)

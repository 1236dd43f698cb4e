"""Text decoded token by token: the same as all at once, wherever tokens divide characters."""

from collections.abc import Sequence
from functools import cache

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from moe.data.tokenizer import Tokenizer
from moe.tasks.decoding.text import TextStreamer, before_stop, last_characters, num_pending


def decode(tokens: Sequence[bytes]) -> str:
    return b"".join(tokens).decode("utf-8", "replace")


def in_bytes(text: str) -> list[bytes]:
    return [bytes([byte]) for byte in text.encode()]


def pieces(tokens: Sequence[bytes], stop: Sequence[str] = ()) -> list[str]:
    """Text that each token adds, then the end."""
    text = TextStreamer(lambda ids: decode([tokens[id] for id in ids]), stop, before=range(0))
    additions = list[str]()
    for token in range(len(tokens)):
        additions.append(text.take(token))
        if text.has_stopped:
            return additions
    return [*additions, text.end()]


def slow_cut(text: str, stop: Sequence[str]) -> str:
    """Character by character, until a stop string is complete."""
    for end in range(len(text) + 1):
        begins = [end - len(string) for string in stop if text[:end].endswith(string)]
        if begins:
            return text[: min(begins)]
    return text


LETTERS = st.text(alphabet="abé天😀", max_size=4)
TOKENS = st.lists(st.one_of(st.binary(min_size=0, max_size=3), LETTERS.map(str.encode)), max_size=40)
STOP = st.lists(st.text(alphabet="abé天😀", min_size=1, max_size=4), max_size=3)


@given(TOKENS, STOP)
@example([b"a", b"b", b"c", b"d"], ["abcd", "c"])
@example(in_bytes("天天"), ["天天天"])
def test_joined_pieces_are_the_text_up_to_a_stop_string(tokens: list[bytes], stop: list[str]) -> None:
    text = slow_cut(decode(tokens), stop)
    assert "".join(pieces(tokens, stop)) == text
    cut = before_stop(decode(tokens), stop)
    assert (decode(tokens) if cut is None else cut) == text


@given(st.text(max_size=20), STOP, st.data())
def test_pieces_are_whole_characters_wherever_tokens_divide_them(
    text: str, stop: list[str], data: st.DataObject
) -> None:
    raw = text.encode("utf-8", "replace")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=10)))
    tokens = [raw[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    additions = pieces(tokens, stop)
    assert "".join(additions) == slow_cut(raw.decode(), stop)
    assert not any("\ufffd" in piece for piece in additions) or "\ufffd" in text


@pytest.mark.parametrize(
    ("tokens", "stop", "expected"),
    [
        (in_bytes("a天b"), [], ["a", "", "", "天", "b", ""]),
        ([b"x\n", b"de", b"f"], ["\ndef"], ["x", "", ""]),
        ([b"x\n", b"de", b"ad"], ["\ndef"], ["x", "", "\ndead", ""]),
        ([b"x\n", b"de"], ["\ndef"], ["x", "", "\nde"]),
    ],
)
def test_text_is_held_back_while_it_may_become_a_character_or_a_stop_string(
    tokens: list[bytes], stop: list[str], expected: list[str]
) -> None:
    assert pieces(tokens, stop) == expected


@given(st.text(alphabet="ab", max_size=8), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3))
def test_only_the_beginning_of_a_stop_string_is_held_back(text: str, stop: list[str]) -> None:
    ends = [text[len(text) - length :] for length in range(1, len(text) + 1)]
    beginnings = [end for end in ends if any(string.startswith(end) and string != end for string in stop)]
    assert num_pending(text, stop) == max(map(len, beginnings), default=0)


def test_bytes_that_are_no_text_do_not_take_ever_longer() -> None:
    lengths = list[int]()

    def decode(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return "\ufffd" * len(ids)

    text = TextStreamer(decode)
    assert "".join(text.take(0) for _ in range(1600)) == ""
    assert sum(lengths) < 1600 * 1600 / 16
    assert text.end() == "\ufffd" * 1600


@cache
def bpe_tokenizer() -> Tokenizer:
    return Tokenizer.train(["the quick brown fox jumps", "über die Brücke 天天 fox"] * 4, 300)


@cache
def of_bytes() -> Tokenizer:
    """Tokenizer like those of Llama 2 and Mixtral: a character without a token becomes one token per byte, and a run of
    byte tokens that is not UTF-8 decodes to nothing."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz"]
    vocabulary = {word: index for index, word in enumerate(words)}
    bpe = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    return Tokenizer.of_model(bpe.to_str(), bos_id=1, eos_id=2)


@given(st.text(alphabet="the fox ü天😀", max_size=20), st.text(alphabet="the fox ü天😀", max_size=20))
def test_a_text_continues_another_as_its_tokenizer_decodes_both(prompt: str, text: str) -> None:
    tokenizer = bpe_tokenizer()
    before, ids = tokenizer.encode(prompt), tokenizer.encode(text)
    continuation = TextStreamer(tokenizer.decode, before=last_characters(before, tokenizer.decode))
    addition = "".join([*map(continuation.take, ids), continuation.end()])
    assert tokenizer.decode(before) + addition == tokenizer.decode([*before, *ids])
    assert continuation.num_tokens == len(ids)


@given(st.text(alphabet="ab བོད天😀é", min_size=1, max_size=12), st.text(alphabet="ab བོད天😀é", max_size=12))
@example("in བོད", "ཡིག a")
@example("བོད་ཡིག", "ཤེས་རབ")
def test_a_text_continues_from_tokens_of_bytes(prompt: str, text: str) -> None:
    tokenizer = of_bytes()
    before = [1, *tokenizer.encode(prompt)]
    ids = tokenizer.encode(prompt + text)[len(before) - 1 :]
    continuation = TextStreamer(tokenizer.decode, before=last_characters(before, tokenizer.decode))
    additions = [*map(continuation.take, ids), continuation.end()]
    assert "".join(additions) == text
    assert not additions[-1]

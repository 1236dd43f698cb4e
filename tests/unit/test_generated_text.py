"""Text out of tokens in pieces: the same as all at once, whatever the borders of tokens cut."""

from collections.abc import Sequence
from functools import cache

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from moe.data.tokenizer import Tokenizer
from moe.tasks.decoding.text import TextSoFar, before_stop, last_of, num_held_back

BYTES = [bytes([each]) for each in range(256)]
"""Tokens of a byte each."""


def decoded(tokens: Sequence[bytes]) -> str:
    return b"".join(tokens).decode("utf-8", "replace")


def pieces(tokens: Sequence[bytes], stop: Sequence[str] = (), before: Sequence[bytes] = ()) -> list[str]:
    """What comes of each token, and at the end."""
    numbered = [*before, *tokens]
    text = TextSoFar(lambda ids: decoded([numbered[id] for id in ids]), stop, before=range(len(before)))
    found = list[str]()
    for token in range(len(before), len(numbered)):
        found.append(text.take(token))
        if text.has_stopped:
            return found
    return [*found, text.end()]


def slow_cut(text: str, stop: Sequence[str]) -> str:
    """Reads letter by letter, until a stop string is whole."""
    for end in range(len(text) + 1):
        begins = [end - len(each) for each in stop if text[:end].endswith(each)]
        if begins:
            return text[: min(begins)]
    return text


LETTERS = st.text(alphabet="abé天😀", max_size=4)
TOKENS = st.lists(st.one_of(st.binary(min_size=0, max_size=3), LETTERS.map(str.encode)), max_size=40)
STOP = st.lists(st.text(alphabet="abé天😀", min_size=1, max_size=4), max_size=3)


@given(TOKENS, STOP)
@example([b"a", b"b", b"c", b"d"], ["abcd", "c"])
@example([each.to_bytes() for each in "天天".encode()], ["天天天"])
def test_pieces_joined_are_the_text_up_to_a_stop_string(tokens: list[bytes], stop: list[str]) -> None:
    assert "".join(pieces(tokens, stop)) == slow_cut(decoded(tokens), stop)


@given(st.text(max_size=20), STOP, st.data())
def test_whole_characters_come_however_their_bytes_are_cut(text: str, stop: list[str], data: st.DataObject) -> None:
    raw = text.encode("utf-8", "replace")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=10)))
    tokens = [raw[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    found = pieces(tokens, stop)
    assert "".join(found) == slow_cut(raw.decode(), stop)
    assert not any("\ufffd" in piece for piece in found) or "\ufffd" in text


def test_a_character_comes_with_its_last_byte() -> None:
    assert pieces([each.to_bytes() for each in "a天b".encode()]) == ["a", "", "", "天", "b", ""]


def test_what_may_become_a_stop_string_is_held_back_until_it_does_not() -> None:
    assert pieces([b"x\n", b"de", b"f"], ["\ndef"]) == ["x", "", ""]
    assert pieces([b"x\n", b"de", b"ad"], ["\ndef"]) == ["x", "", "\ndead", ""]
    assert pieces([b"x\n", b"de"], ["\ndef"]) == ["x", "", "\nde"]


@given(st.text(alphabet="ab", max_size=8), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3))
def test_no_more_is_held_back_than_a_stop_string_may_begin_with(text: str, stop: list[str]) -> None:
    number = num_held_back(text, stop)
    ends = [text[len(text) - each :] for each in range(1, len(text) + 1)]
    may_begin = [end for end in ends if any(each.startswith(end) and each != end for each in stop)]
    assert number == max(map(len, may_begin), default=0)


@given(st.text(alphabet="abc", max_size=12), st.lists(st.text(alphabet="abc", min_size=1, max_size=3), max_size=3))
def test_the_text_before_a_stop_string_is_that_of_reading_letter_by_letter(text: str, stop: list[str]) -> None:
    cut = before_stop(text, stop)
    assert (text if cut is None else cut) == slow_cut(text, stop)


def test_what_is_no_text_does_not_take_ever_longer() -> None:
    lengths = list[int]()

    def decode(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return "\ufffd" * len(ids)

    text = TextSoFar(decode)
    assert "".join(text.take(0) for _ in range(1600)) == ""
    assert sum(lengths) < 1600 * 1600 / 16
    assert text.end() == "\ufffd" * 1600


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["the quick brown fox jumps", "über die Brücke 天天 fox"] * 4, 300)


@given(st.text(alphabet="the fox ü天😀", max_size=20), st.text(alphabet="the fox ü天😀", max_size=20))
def test_a_text_goes_on_from_another_as_the_tokenizer_has_it(tokenizer: Tokenizer, prompt: str, text: str) -> None:
    before, ids = tokenizer.encode(prompt), tokenizer.encode(text)
    going_on = TextSoFar(tokenizer.decode, before=last_of(before, tokenizer.decode))
    found = "".join([*map(going_on.take, ids), going_on.end()])
    assert tokenizer.decode(before) + found == tokenizer.decode([*before, *ids])
    assert going_on.num_tokens == len(ids)


@cache
def of_bytes() -> Tokenizer:
    """Tokenizer as Llama 2 and Mixtral have them: what is no token is written in bytes, a token each, and a run of
    these that is no UTF-8 as a whole is decoded to no character at all."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{each:02X}>" for each in range(256)), *"▁abcdefghijklmnopqrstuvwxyz"]
    vocabulary = {word: at for at, word in enumerate(words)}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    return Tokenizer.of_model(made.to_str(), bos_id=1, eos_id=2)


@given(st.text(alphabet="ab བོད天😀é", min_size=1, max_size=12), st.text(alphabet="ab བོད天😀é", max_size=12))
@example("in བོད", "ཡིག a")
@example("བོད་ཡིག", "ཤེས་རབ")
def test_a_text_goes_on_from_bytes(prompt: str, text: str) -> None:
    before = [1, *of_bytes().encode(prompt)]
    ids = of_bytes().encode(prompt + text)[len(before) - 1 :]
    going_on = TextSoFar(of_bytes().decode, before=last_of(before, of_bytes().decode))
    pieces = [*map(going_on.take, ids), going_on.end()]
    assert "".join(pieces) == text
    assert not pieces[-1]

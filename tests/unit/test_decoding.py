"""Greedy decoding, sampling and beam search against plain loops and brute force, on a model that is a table."""

import itertools
import math
from collections.abc import Collection, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe.spec.generation import GenerationSpec
from moe.tasks.decoding import beam_search, choose_tokens, sample_tokens
from tests.refusals import expect_problem

STATES = 251
seeds, starts_of_texts = st.integers(0, 999), st.lists(st.integers(0, STATES - 1), min_size=1, max_size=6)


class Table:
    """A model whose next token depends on all earlier tokens, through the state that they lead to."""

    def __init__(self, seed: int, vocabulary: int, starts: Sequence[int] = (0,)) -> None:
        draws = torch.Generator().manual_seed(seed)
        self.table_SV = 2 * torch.randn(STATES, vocabulary, generator=draws, dtype=torch.float64)
        self.states = torch.tensor(starts, dtype=torch.int64)
        self.num_passes = 0

    @property
    def logits(self) -> Tensor:
        return self.table_SV[self.states]

    def after(self, states: Tensor, tokens: Tensor) -> Tensor:
        return (7 * states + 31 * tokens + 1) % STATES

    def next(self, tokens: Tensor) -> Tensor:
        assert tokens.shape == self.states.shape
        self.num_passes += 1
        self.states = self.after(self.states, tokens)
        return self.logits

    def take_rows(self, rows: Tensor) -> None:
        self.states = self.states[rows]

    def logp(self, start: int, text: Sequence[int]) -> float:
        """Log-likelihood of a text, including its end token."""
        state, total = torch.tensor(start), 0.0
        for token in text:
            total += float(self.table_SV[state].log_softmax(-1)[token])
            state = self.after(state, torch.tensor(token))
        return total


def decode(
    table: Table, spec: GenerationSpec, ends: Collection[int], numbers: Sequence[int] | None = None
) -> list[list[int]]:
    texts: list[list[int]] = [[] for _ in table.states]
    for tokens in sample_tokens(table, table.logits, spec, ends, text_numbers=numbers):
        for row, token in tokens.items():
            texts[row].append(token)
    return texts


def search(table: Table, spec: GenerationSpec, ends: Collection[int], **limits: list[int]) -> list[list[int]]:
    return beam_search(table, table.logits, spec, ends, **limits)


@given(seeds, starts_of_texts, st.integers(1, 20))
def test_greedy_decoding_is_a_plain_loop(seed: int, starts: list[int], max_tokens: int) -> None:
    ends = {0, 3}
    for start, text in zip(
        starts, decode(Table(seed, 7, starts), GenerationSpec(max_tokens=max_tokens), ends), strict=True
    ):
        table, plain = Table(seed, 7, [start]), list[int]()
        while len(plain) < max_tokens and not (plain and plain[-1] in ends):
            logits = table.logits if not plain else table.next(torch.tensor(plain[-1:]))
            plain.append(int(logits[0].argmax()))
        assert text == plain


@given(
    seeds, st.sampled_from([0.0, 0.3, 0.6, 1.0, 2.0]), st.integers(1, 3), st.sets(st.integers(0, 2), max_size=2),
    st.lists(st.integers(0, STATES - 1), min_size=1, max_size=3),
)  # fmt: skip
def test_beams_for_all_texts_find_the_best_of_all(
    seed: int, penalty: float, max_tokens: int, ends: set[int], starts: list[int]
) -> None:
    table, spec = Table(seed, 3, starts), GenerationSpec(max_tokens=max_tokens, num_beams=27, length_penalty=penalty)
    inner = sorted(set(range(3)) - ends)
    for start, text in zip(starts, search(table, spec, ends), strict=True):

        def score(tokens: Sequence[int], start: int = start) -> float:
            return table.logp(start, tokens) / ((5 + len(tokens)) / 6) ** penalty

        def best_ending(tokens: Sequence[int]) -> float:
            if len(tokens) == max_tokens:
                return score(tokens)
            return max((score([*tokens, end]) for end in ends), default=-math.inf)

        candidates = (tokens for length in range(max_tokens + 1) for tokens in itertools.product(inner, repeat=length))
        assert best_ending(text) == pytest.approx(max(map(best_ending, candidates)), abs=1e-9)
        assert not ends & set(text)


@given(seeds, starts_of_texts, st.data())
def test_a_searched_row_alone_equals_the_row_among_others(seed: int, starts: list[int], data: st.DataObject) -> None:
    limits = data.draw(st.lists(st.integers(1, 12), min_size=len(starts), max_size=len(starts)))
    spec = GenerationSpec(max_tokens=10, num_beams=3, length_penalty=data.draw(st.sampled_from([1.0, 5.0])))
    table = Table(seed, 9, starts)
    for start, limit, text in zip(starts, limits, search(table, spec, {1}, max_tokens=limits), strict=True):
        limited_spec = spec.model_copy(update={"max_tokens": min(10, limit)})
        assert search(Table(seed, 9, [start]), limited_spec, {1}) == [text]
        assert len(text) <= limit


def test_one_beam_without_normalisation_is_greedy_to_the_end_of_the_text() -> None:
    starts = list(range(40))
    # Users cannot request this: one beam is greedy decoding.
    spec = GenerationSpec(max_tokens=30).model_copy(update={"length_penalty": 0.0})
    greedy = decode(Table(5, 9, starts), GenerationSpec(max_tokens=30), {2})
    assert search(Table(5, 9, starts), spec, {2}) == [text[:-1] if text[-1] == 2 else text for text in greedy]


def test_a_search_ends_when_no_beam_can_score_better() -> None:
    table = Table(0, 4)
    table.table_SV[:] = torch.tensor([0.0, -9.0, -9.0, 30.0])  # most likely it ends at once
    assert search(table, GenerationSpec(max_tokens=50, num_beams=2, length_penalty=1), {3}) == [[]]
    assert table.num_passes == 0
    table = Table(0, 4)
    table.table_SV[:] = torch.tensor([-torch.inf, -torch.inf, -torch.inf, 0.0])  # it cannot continue
    assert search(table, GenerationSpec(max_tokens=5, num_beams=4), {3}) == [[]]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_their_probabilities(temperature: float) -> None:
    logits, number = torch.tensor([1.0, -1.0, 0.3, 2.0, -3.0]), 40_000
    tokens = choose_tokens(logits.expand(number, -1), GenerationSpec(temperature=temperature), torch.arange(number), 3)
    expected = (logits / temperature).softmax(-1)
    assert torch.allclose(torch.bincount(tokens, minlength=5) / number, expected, atol=4 * math.sqrt(0.25 / number))


@given(
    st.lists(st.integers(-40, 40), min_size=1, max_size=12),
    st.one_of(st.none(), st.integers(1, 14)), st.floats(0.01, 1.0), st.sampled_from([0.3, 1.0, 4.0]),
)  # fmt: skip
def test_top_k_and_top_p_leave_the_tokens_of_a_slow_reference(
    tenths: list[int], top_k: int | None, top_p: float, temperature: float
) -> None:
    scores = [tenth / 10 / temperature for tenth in tenths]
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))[:top_k]
    total, mass, candidates = sum(math.exp(scores[token]) for token in order), 0.0, set[int]()
    for token in order:
        if abs(mass - top_p) < 1e-9:
            return  # rounding decides
        if mass < top_p:
            candidates.add(token)
        mass += math.exp(scores[token]) / total
    spec = GenerationSpec(temperature=temperature, top_k=top_k, top_p=top_p)
    logits = torch.tensor(tenths, dtype=torch.float64).div(10).expand(600, -1)
    draws = set(choose_tokens(logits, spec, torch.arange(600), 0).tolist())
    weights = {token: math.exp(scores[token]) for token in candidates}
    likely = {token for token, weight in weights.items() if weight > 0.05 * sum(weights.values())}
    assert likely <= draws <= candidates


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-300])
def test_hardly_any_temperature_takes_the_likeliest(temperature: float) -> None:
    """Of equal logits, the token with the lower id."""
    logits = torch.tensor([[-4.0, -2.0, -3.0], [5.0, 1.0, 9.0]])
    spec = GenerationSpec(temperature=temperature)
    assert choose_tokens(logits, spec, torch.arange(2), 0).tolist() == [1, 2]
    assert choose_tokens(torch.tensor([[0.0, 2.0, 2.0, 1.0]]), GenerationSpec(), torch.zeros(1).long(), 0).tolist() == [
        1
    ]


@given(st.integers(0, 99), starts_of_texts, st.integers(0, 9))
def test_a_drawn_row_alone_equals_the_row_among_others(seed: int, starts: list[int], key: int) -> None:
    spec = GenerationSpec(max_tokens=12, temperature=1.2, top_p=0.9, seed=key)
    for row, (start, text) in enumerate(zip(starts, decode(Table(seed, 9, starts), spec, {0, 1}), strict=True)):
        assert decode(Table(seed, 9, [start]), spec, {0, 1}, [row]) == [text]


def test_texts_differ_between_seeds_and_rows_only() -> None:
    def draw_texts(seed: int) -> list[list[int]]:
        return decode(Table(1, 50, [3, 3]), GenerationSpec(max_tokens=20, temperature=1.0, seed=seed), ())

    assert draw_texts(1) == draw_texts(1) != draw_texts(2)
    assert draw_texts(1)[0] != draw_texts(1)[1]


def test_a_reader_may_end_rows() -> None:
    table, counts = Table(2, 9, [4, 5, 6]), [0, 0, 0]
    decoding = sample_tokens(table, table.logits, GenerationSpec(max_tokens=50), ())
    tokens = next(decoding)
    while True:
        for row in tokens:
            counts[row] += 1
        try:
            tokens = decoding.send([row for row in tokens if counts[row] == 3 * (row + 1)])
        except StopIteration:
            break
    assert counts == [3, 6, 9]


def test_sampling_and_search_at_once_are_refused() -> None:
    with expect_problem("not_applicable", "num_beams", 4):
        GenerationSpec(num_beams=4, temperature=0.7)
    with expect_problem("not_applicable", "top_k", 4):
        GenerationSpec(temperature=0, top_k=4)

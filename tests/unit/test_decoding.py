"""The choice of tokens, against plain loops and brute force, by a model that is a table."""

import itertools
import math
from collections.abc import Collection, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe.spec.generation import GenerationSpec
from moe.tasks.decoding import beam_search, choose_tokens, one_by_one
from tests.refusals import refused

STATES = 251


class Table:
    """A model whose next token depends on all tokens so far, by the state that they lead to."""

    def __init__(self, seed: int, vocabulary: int, starts: Sequence[int] = (0,), spread: float = 2.0) -> None:
        draws = torch.Generator().manual_seed(seed)
        self.table_SV = spread * torch.randn(STATES, vocabulary, generator=draws, dtype=torch.float64)
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
        """Log-likelihood of a text, whatever ends it among its tokens."""
        state, total = torch.tensor(start), 0.0
        for token in text:
            total += float(self.table_SV[state].log_softmax(-1)[token])
            state = self.after(state, torch.tensor(token))
        return total


def texts_of(
    table: Table, spec: GenerationSpec, ends: Collection[int], numbers: Sequence[int] | None = None
) -> list[list[int]]:
    texts: list[list[int]] = [[] for _ in table.states]
    for found in one_by_one(table, table.logits, spec, ends, texts=numbers):
        for row, token in found.items():
            texts[row].append(token)
    return texts


@given(st.integers(0, 999), st.lists(st.integers(0, STATES - 1), min_size=1, max_size=6), st.integers(1, 20))
def test_greedy_is_a_plain_loop(seed: int, starts: list[int], max_tokens: int) -> None:
    ends = {0, 3}
    found = texts_of(Table(seed, 7, starts), GenerationSpec(max_tokens=max_tokens), ends)
    for start, text in zip(starts, found, strict=True):
        plain = list[int]()
        table = Table(seed, 7, [start])
        while len(plain) < max_tokens and not (plain and plain[-1] in ends):
            logits = table.logits if not plain else table.next(torch.tensor(plain[-1:]))
            plain.append(int(logits[0].argmax()))
        assert text == plain


def test_of_equal_logits_the_lower_token_is_taken() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    assert choose_tokens(logits, GenerationSpec(), torch.zeros(1, dtype=torch.int64), 0).tolist() == [1]


@given(
    st.integers(0, 999), st.sampled_from([0.0, 0.3, 0.6, 1.0, 2.0]), st.integers(1, 3),
    st.sets(st.integers(0, 2), max_size=2), st.lists(st.integers(0, STATES - 1), min_size=1, max_size=3),
)  # fmt: skip
def test_beams_for_all_texts_find_the_best_of_all(
    seed: int, penalty: float, max_tokens: int, ends: set[int], starts: list[int]
) -> None:
    vocabulary = 3
    spec = GenerationSpec(max_tokens=max_tokens, num_beams=vocabulary**3, length_penalty=penalty)
    found = beam_search(table := Table(seed, vocabulary, starts), table.logits, spec, ends)
    for start, text in zip(starts, found, strict=True):

        def score(tokens: Sequence[int], start: int = start) -> float:
            return table.logp(start, tokens) / ((5 + len(tokens)) / 6) ** penalty

        going_on = sorted(set(range(vocabulary)) - ends)
        best = -math.inf
        for length in range(max_tokens + 1):
            for tokens in itertools.product(going_on, repeat=length):
                if length == max_tokens:
                    best = max(best, score(tokens))
                else:
                    best = max([best, *(score([*tokens, end]) for end in ends)])
        ways = [score([*text, end]) for end in ends] if len(text) < max_tokens else [score(text)]
        assert max(ways) == pytest.approx(best, abs=1e-9)
        assert not ends & set(text)


@given(
    st.integers(0, 999), st.lists(st.integers(0, STATES - 1), min_size=1, max_size=6), st.data(),
)  # fmt: skip
def test_a_searched_row_alone_is_the_row_among_others(seed: int, starts: list[int], data: st.DataObject) -> None:
    limits = data.draw(st.lists(st.integers(1, 12), min_size=len(starts), max_size=len(starts)))
    spec = GenerationSpec(max_tokens=10, num_beams=3)
    together = beam_search(table := Table(seed, 9, starts), table.logits, spec, {1}, max_tokens=limits)
    for start, limit, text in zip(starts, limits, together, strict=True):
        alone = Table(seed, 9, [start])
        limited = spec.model_copy(update={"max_tokens": min(10, limit)})
        assert beam_search(alone, alone.logits, limited, {1}) == [text]
        assert len(text) <= limit


@pytest.mark.parametrize("seed", range(8))
def test_a_row_that_has_reached_its_limit_is_searched_no_further(seed: int) -> None:
    """Though it stays among the others as long as most of them go on."""
    starts, limits = list(range(8)), [3, *[10] * 7]
    spec = GenerationSpec(max_tokens=10, num_beams=3, length_penalty=5.0)  # for long texts
    table = Table(seed, 9, starts)
    together = beam_search(table, table.logits, spec, {1}, max_tokens=limits)
    assert len(together[0]) <= 3
    table.states = torch.tensor([0])
    assert beam_search(table, table.logits, spec, {1}, max_tokens=[3]) == together[:1]


def test_one_beam_without_normalisation_is_greedy_to_the_end_of_the_text() -> None:
    starts = list(range(40))
    # Nobody can ask for it: one beam is no search.
    spec = GenerationSpec(max_tokens=30).model_copy(update={"length_penalty": 0.0})
    searched = beam_search(table := Table(5, 9, starts), table.logits, spec, {2})
    assert searched == [text[:-1] if text[-1] == 2 else text for text in texts_of(Table(5, 9, starts), spec, {2})]


def test_a_search_ends_when_no_beam_can_score_better() -> None:
    table = Table(0, 4)
    table.table_SV[:] = torch.tensor([0.0, -9.0, -9.0, 30.0])  # it ends at once, most likely
    assert beam_search(table, table.logits, GenerationSpec(max_tokens=50, num_beams=2, length_penalty=1), {3}) == [[]]
    assert table.num_passes == 0


def test_where_nothing_can_follow_but_the_end_the_text_is_empty() -> None:
    table = Table(0, 3)
    table.table_SV[:] = torch.tensor([-torch.inf, -torch.inf, 0.0])
    assert beam_search(table, table.logits, GenerationSpec(max_tokens=5, num_beams=4), {2}) == [[]]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_are_as_frequent_as_their_probabilities(temperature: float) -> None:
    logits = torch.tensor([1.0, -1.0, 0.3, 2.0, -3.0])
    number = 40_000
    tokens = choose_tokens(logits.expand(number, -1), GenerationSpec(temperature=temperature), torch.arange(number), 3)
    frequencies = torch.bincount(tokens, minlength=5) / number
    expected = (logits / temperature).softmax(-1)
    assert torch.allclose(frequencies, expected, atol=4 * math.sqrt(0.25 / number))


@given(
    st.lists(st.integers(-40, 40), min_size=1, max_size=12),
    st.one_of(st.none(), st.integers(1, 14)), st.floats(0.01, 1.0), st.sampled_from([0.3, 1.0, 4.0]),
)  # fmt: skip
def test_what_may_be_drawn_is_what_a_slow_reference_says(
    tenths: list[int], top_k: int | None, top_p: float, temperature: float
) -> None:
    scores = [each / 10 / temperature for each in tenths]
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))[:top_k]
    total, reached, standing = sum(math.exp(scores[token]) for token in order), 0.0, set[int]()
    for token in order:
        if abs(reached - top_p) < 1e-9:
            return  # rounding decides
        if reached < top_p:
            standing.add(token)
        reached += math.exp(scores[token]) / total
    spec = GenerationSpec(temperature=temperature, top_k=top_k, top_p=top_p)
    logits = torch.tensor(tenths, dtype=torch.float64).div(10).expand(600, -1)
    drawn = set(choose_tokens(logits, spec, torch.arange(600), 0).tolist())
    assert drawn <= standing
    likely = {
        token for token in standing if math.exp(scores[token]) / sum(math.exp(scores[each]) for each in standing) > 0.05
    }
    assert likely <= drawn


@pytest.mark.parametrize("temperature", [5e-324, 1e-300])
def test_hardly_any_temperature_takes_the_likeliest(temperature: float) -> None:
    logits = torch.tensor([[-4.0, -2.0, -3.0], [5.0, 1.0, 9.0]])
    assert choose_tokens(logits, GenerationSpec(temperature=temperature), torch.arange(2), 0).tolist() == [1, 2]


@given(st.integers(0, 99), st.lists(st.integers(0, STATES - 1), min_size=2, max_size=8), st.integers(0, 9))
def test_a_drawn_row_alone_is_the_row_among_others(seed: int, starts: list[int], key: int) -> None:
    spec = GenerationSpec(max_tokens=12, temperature=1.2, top_p=0.9, seed=key)
    together = texts_of(Table(seed, 9, starts), spec, {0, 1})
    for row, (start, text) in enumerate(zip(starts, together, strict=True)):
        assert texts_of(Table(seed, 9, [start]), spec, {0, 1}, [row]) == [text]


def test_another_seed_another_text_and_the_same_seed_the_same() -> None:
    def drawn(seed: int) -> list[list[int]]:
        return texts_of(Table(1, 50, [3]), GenerationSpec(max_tokens=20, temperature=1.0, seed=seed), ())

    assert drawn(1) == drawn(1) != drawn(2)


def test_two_texts_of_one_prompt_are_drawn_apart() -> None:
    first, second = texts_of(Table(1, 50, [3, 3]), GenerationSpec(max_tokens=20, temperature=1.0), ())
    assert first != second


def test_a_row_ends_where_its_reader_says_so() -> None:
    table = Table(2, 9, [4, 5, 6])
    decoding = one_by_one(table, table.logits, GenerationSpec(max_tokens=50), ())
    found, counts = next(decoding), [0, 0, 0]
    while True:
        for row in found:
            counts[row] += 1
        try:
            found = decoding.send([row for row in found if counts[row] == 3 * (row + 1)])
        except StopIteration:
            break
    assert counts == [3, 6, 9]


def test_drawing_and_searching_at_once_is_refused() -> None:
    with refused("not_applicable", "num_beams", 4):
        GenerationSpec(num_beams=4, temperature=0.7)
    with refused("not_applicable", "top_k", 4):
        GenerationSpec(top_k=4)

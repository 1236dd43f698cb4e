"""Log-likelihoods that are computed together, beside a pass over each row alone, and beside transformers' logits."""

from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from moe.tasks.batch_context import BatchContext
from moe.tasks.language import LanguageModel, build_model
from moe.tasks.language.likelihood import Likelihood, log_likelihoods, rolling_pairs
from tests.grid import num_cases
from tests.language.families import FAMILIES, as_double, both
from tests.parity.language_models import VOCABULARY, language_model
from tests.parity.random_language import language_models
from tests.parity.trajectory import Degrees

Pairs = list[tuple[list[int], list[int]]]


def random_pairs(random: Random, vocab_size: int, number: int, longest: int) -> Pairs:
    def tokens() -> list[int]:
        return [random.randrange(vocab_size) for _ in range(random.randint(1, longest))]

    return [(tokens(), tokens()) for _ in range(number)]


def plain(logits_LV: torch.Tensor, continuation: list[int]) -> Likelihood:
    """Of the tokens that a row ends in, whose last position predicts the last of them: one at a time."""
    nats, is_greedy = 0.0, True
    for logits_V, token in zip(logits_LV[-len(continuation) :], continuation, strict=True):
        nats += float(logits_V.double().log_softmax(0)[token])
        is_greedy &= int(logits_V.argmax()) == token
    return Likelihood(nats, is_greedy)


def require_same(found: list[Likelihood], expected: list[Likelihood]) -> None:
    assert [each.nats for each in found] == pytest.approx([each.nats for each in expected], rel=1e-9)
    assert [each.is_greedy for each in found] == [each.is_greedy for each in expected]


@settings(max_examples=num_cases(25), deadline=None, phases=[Phase.explicit, Phase.generate], print_blob=True)
@given(data=st.data())
def test_any_model_gives_each_row_what_it_has_alone(data: st.DataObject) -> None:
    model = build_model(data.draw(language_models(Degrees()), "model"), dtype=torch.float64).eval()
    random, max_tokens = (Random(data.draw(st.integers(0, 999), "seed")), data.draw(st.integers(1, 12), "max_tokens"))
    pairs = [
        (context, continuation[:max_tokens])
        for context, continuation in random_pairs(random, VOCABULARY, random.randint(1, 12), 9)
    ]
    expected = [alone(model, *pair, max_tokens) for pair in pairs]
    continued = [(context, [likeliest(model, context, max_tokens)]) for context, _ in pairs]
    found = log_likelihoods(model, [*pairs, *continued], max_tokens)
    require_same(found[: len(pairs)], expected)
    assert all(each.is_greedy for each in found[len(pairs) :])


@torch.no_grad()
def alone(model: LanguageModel, context: list[int], continuation: list[int], max_tokens: int) -> Likelihood:
    read = [*context, *continuation][:-1][-max_tokens:]
    return plain(model(torch.tensor([read]), BatchContext(training=False, rows_per_group=1))[0], continuation)


@torch.no_grad()
def likeliest(model: LanguageModel, context: list[int], max_tokens: int) -> int:
    read = torch.tensor([context[-max_tokens:]])
    return int(model(read, BatchContext(training=False, rows_per_group=1))[0, -1].argmax())


@torch.no_grad()
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_they_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    random = Random(family)
    found = both(FAMILIES[family](random), tmp_path)
    pairs = random_pairs(random, found.spec.vocab_size, 9, 12)
    expected = []
    with as_double():
        for context, continuation in pairs:
            read = torch.tensor([[*context, *continuation][:-1]])
            expected.append(plain(found.theirs(read, use_cache=False).logits[0], continuation))
    require_same(log_likelihoods(found.ours, pairs, 64), expected)


@given(tokens=st.lists(st.integers(3, 99), max_size=40), max_tokens=st.integers(1, 12))
def test_windows_of_a_whole_text_are_the_harness(tokens: list[int], max_tokens: int) -> None:
    theirs = [
        make_disjoint_window(pair)
        for pair in get_rolling_token_windows(tokens, prefix_token=1, max_seq_len=max_tokens, context_len=1)
    ]
    assert [(list(context), list(after)) for context, after in rolling_pairs(tokens, 1, max_tokens)] == theirs


def test_a_whole_text_is_minus_the_sum_of_its_losses() -> None:
    """Of one that fits: the loss of training, token by token."""
    model = build_model(language_model("DeltaNet and gated GQA", router="softmax_topk"), dtype=torch.float64).eval()
    tokens = [Random(5).randrange(VOCABULARY) for _ in range(40)]
    (found,) = log_likelihoods(model, list(rolling_pairs(tokens, 1, 40)), 40)
    with torch.no_grad():
        logits = model(torch.tensor([[1, *tokens[:-1]]]), BatchContext(training=False, rows_per_group=1))
    nll = torch.nn.functional.cross_entropy(logits[0], torch.tensor(tokens), reduction="sum")
    assert found.nats == pytest.approx(-float(nll), rel=1e-10)


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        (([], [1]), "must have at least one token in its context"),
        (([1], []), "must have at least one token in its context"),
        (([1], [2, 3, 4]), r"a continuation of 3 tokens, more than max_tokens \(=2\)"),
    ],
)
def test_what_has_no_likelihood_is_refused(pair: tuple[list[int], list[int]], said: str) -> None:
    model = build_model(language_model("DeltaNet and gated GQA", router="softmax_topk"), dtype=torch.float64).eval()
    with pytest.raises(ValueError, match=rf"pairs\[1\] .*{said}"):
        log_likelihoods(model, [([1], [1]), pair], 2)

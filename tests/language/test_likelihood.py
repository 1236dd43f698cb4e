"""Log-likelihoods of a batch compared with a pass over each row alone. Logits are compared with transformers' in
test_families.py."""

from random import Random

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from moe.tasks.batch_context import BatchContext
from moe.tasks.language import LanguageModel, build_model
from moe.tasks.language.likelihood import log_likelihoods, rolling_pairs
from tests.grid import num_cases
from tests.parity.language_models import VOCABULARY, language_model
from tests.parity.random_language import language_models
from tests.parity.trajectory import Degrees


@settings(max_examples=num_cases(25), deadline=None, phases=[Phase.explicit, Phase.generate], print_blob=True)
@given(data=st.data())
def test_likelihoods_of_a_batch_are_those_of_each_row_alone(data: st.DataObject) -> None:
    model = build_model(data.draw(language_models(Degrees()), "model"), dtype=torch.float64).eval()
    random, max_tokens = Random(data.draw(st.integers(0, 999), "seed")), data.draw(st.integers(1, 12), "max_tokens")
    pairs, expected = [], []
    for _ in range(random.randint(1, 12)):
        context, continuation = (
            [random.randrange(VOCABULARY) for _ in range(random.randint(1, longest))]
            for longest in (9, min(9, max_tokens))
        )
        pairs.append((context, continuation))
        expected.append(reference_likelihood(model, context, continuation, max_tokens))
    likeliest = [(context, [int(logits_of(model, context[-max_tokens:])[-1].argmax())]) for context, _ in pairs]
    likelihoods = log_likelihoods(model, [*pairs, *likeliest], max_tokens)
    assert all(likelihood.is_greedy for likelihood in likelihoods[len(pairs) :])
    for likelihood, (nats, is_greedy) in zip(likelihoods, expected, strict=False):
        assert (likelihood.nats, likelihood.is_greedy) == (pytest.approx(nats, rel=1e-9), is_greedy)


@torch.no_grad()
def logits_of(model: LanguageModel, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens]), BatchContext(training=False, rows_per_group=1))[0]


def reference_likelihood(
    model: LanguageModel, context: list[int], continuation: list[int], max_tokens: int
) -> tuple[float, bool]:
    """Log-probability of a continuation, token by token, and whether each token is the likeliest."""
    nats, is_greedy = 0.0, True
    logits_LV = logits_of(model, [*context, *continuation][:-1][-max_tokens:])
    for logits_V, token in zip(logits_LV[-len(continuation) :], continuation, strict=True):
        nats += float(logits_V.double().log_softmax(0)[token])
        is_greedy &= int(logits_V.argmax()) == token
    return nats, is_greedy


@given(tokens=st.lists(st.integers(3, 99), max_size=40), max_tokens=st.integers(1, 12))
def test_windows_of_a_whole_text_are_the_harness(tokens: list[int], max_tokens: int) -> None:
    windows = [
        make_disjoint_window(pair)
        for pair in get_rolling_token_windows(tokens, prefix_token=1, max_seq_len=max_tokens, context_len=1)
    ]
    assert [(list(context), list(after)) for context, after in rolling_pairs(tokens, 1, max_tokens)] == windows


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (([], [1]), "must have at least one token in its context"),
        (([1], []), "must have at least one token in its context"),
        (([1], [2, 3, 4]), r"a continuation of 3 tokens, more than max_tokens \(=2\)"),
    ],
)
def test_what_has_no_likelihood_is_refused(pair: tuple[list[int], list[int]], words: str) -> None:
    model = build_model(language_model("DeltaNet and gated GQA", router="softmax_topk"), dtype=torch.float64).eval()
    with pytest.raises(ValueError, match=rf"pairs\[1\] .*{words}"):
        log_likelihoods(model, [([1], [1]), pair], 2)

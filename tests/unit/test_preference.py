"""Direct preference optimisation, against the formula written out on each answer by itself."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from moe.data.sequences.store import SequenceRows
from moe.layers.nll import token_nll
from moe.parallel import Layout
from moe.spec import AdapterSpec, LanguageModelSpec
from moe.tasks.batch_context import BatchContext
from moe.tasks.language import LanguageModel, build_model
from moe.tasks.language.batches import SequencesBatch
from moe.tasks.language.preference import preference_loss_of, preferences_of
from tests.parity.language_models import ATTENTIONS, VOCABULARY, language_model

DROPLESS = {"router": "softmax_topk", "top_k": 2, "num_experts": 4}
BETA = 0.3


def model_of(attention: str, seed: int) -> LanguageModel:
    spec = language_model(attention, **DROPLESS)
    adapter = AdapterSpec(rank=2, alpha=3.0, targets=("*",))
    model = build_model(LanguageModelSpec(**{**spec.model_dump(), "adapter": adapter}), seed=seed, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for name, each in model.named_parameters():
        if name.endswith("_lora_b"):
            each.data.normal_(0, 0.2, generator=generator)
    return model


def rows_of(seed: int, num_rows: int, length: int) -> SequenceRows:
    """Rows of pairs of answers, each learned from some position on."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(4, VOCABULARY, (num_rows, length))
    labels, documents = np.full_like(tokens, -1), np.full(tokens.shape, -1, np.int32)
    for row in range(num_rows):
        at = 0
        for number in range(2 * int(rng.integers(1, 4))):
            if number % 2 == 0:
                sizes = rng.integers(2, 8, 2)
                if at + sizes.sum() > length:
                    break
            size = int(sizes[number % 2])
            documents[row, at : at + size] = number
            learned = at + int(rng.integers(0, size))
            labels[row, learned : at + size] = rng.integers(4, VOCABULARY, at + size - learned)
            at += size
        tokens[row, at:] = 0
    return SequenceRows(tokens, documents, labels)


def log_probability(model: LanguageModel, tokens: list[int], labels: list[int]) -> torch.Tensor:
    """Of the labels of one answer, which is all that the model is given."""
    logits = model(torch.tensor([tokens]), BatchContext(training=False))[0]
    logp = functional.log_softmax(logits, -1)
    return sum((logp[at, label] for at, label in enumerate(labels) if label >= 0), start=logp.sum() * 0)


def plain(model: LanguageModel, rows: SequenceRows) -> tuple[torch.Tensor, int, int]:
    loss, number, right = torch.zeros((), dtype=torch.float64), 0, 0
    for tokens, documents, labels in zip(*(each.tolist() for each in rows), strict=True):
        for first in range(0, max(documents) + 1, 2):
            gained = []
            for answer in (first, first + 1):
                of = [at for at, document in enumerate(documents) if document == answer]
                given = [tokens[at] for at in of], [labels[at] for at in of]
                with torch.no_grad(), model.without_adapters():
                    before = log_probability(model, *given)
                gained.append(log_probability(model, *given) - before)
            loss = loss - functional.logsigmoid(BETA * (gained[0] - gained[1]))
            number, right = number + 1, right + int(gained[0] > gained[1])
    return loss, number, right


@pytest.mark.sample(5)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_loss_and_gradients_are_those_of_the_formula(attention: str, seed: int):
    model, rows = model_of(attention, seed), rows_of(seed, 5, 24)
    batch = SequencesBatch.from_part(rows, BatchContext(training=False, rows_per_group=1), Layout.single())
    found = preference_loss_of(model, batch, BETA)
    found.objective.backward()
    ours = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    loss, number, right = plain(model, rows)
    loss.backward()
    torch.testing.assert_close(found.objective, loss, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(found.nll, loss, rtol=1e-11, atol=1e-12)
    theirs = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    assert ours.keys() == theirs.keys() == {name for name in ours if "_lora_" in name}
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-9, atol=1e-12, msg=name)
    told = preferences_of(model, batch, BETA)
    assert (int(told.num_pairs), int(told.num_right)) == (number, right)
    torch.testing.assert_close(told.loss, loss, rtol=1e-11, atol=1e-12)
    assert 0 < right < number or number < 4


def test_a_batch_without_rows_has_no_loss():
    empty = SequenceRows(np.zeros((0, 6), np.int64), np.zeros((0, 6), np.int32), np.zeros((0, 6), np.int64))
    batch = SequencesBatch.from_part(empty, BatchContext(rows_per_group=1), Layout.single())
    losses = preference_loss_of(model_of(next(iter(ATTENTIONS)), 0), batch, BETA)
    assert float(losses.objective.detach()) == float(losses.nll) == 0
    losses.objective.backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_nll_of_each_token_and_its_gradients(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("moe.layers.nll.loss_tokens", lambda *_: 3)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(10, 6, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    table = torch.randn(9, 6, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.tensor([0, -1, 3, 8, -1, 2, 2, 1, 7, -1])
    weight = torch.linspace(-1, 1, 10, dtype=torch.float64)
    found = token_nll(hidden, table, labels, -1)
    (found.double() * weight).sum().backward()
    ours = hidden.grad, table.grad
    wide_hidden, wide_table = (each.detach().double().requires_grad_() for each in (hidden, table))
    logp = functional.log_softmax(wide_hidden @ wide_table.t(), -1)
    plain = -logp.gather(1, labels.clamp(min=0)[:, None]).squeeze(1) * (labels >= 0)
    (plain * weight).sum().backward()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(found.double(), plain, rtol=tolerance, atol=tolerance)
    for one, other in zip(ours, (wide_hidden.grad, wide_table.grad), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)

"""Direct preference optimization against its formula, evaluated on each answer separately."""

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
    for name, parameter in model.named_parameters():
        if name.endswith("_lora_b"):
            parameter.data.normal_(0, 0.2, generator=generator)
    return model


def rows_of(seed: int, num_rows: int, length: int) -> SequenceRows:
    """Rows of pairs of answers, each with labels from a random position on."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(4, VOCABULARY, (num_rows, length))
    labels, documents = np.full_like(tokens, -1), np.full(tokens.shape, -1, np.int32)
    for row in range(num_rows):
        offset = 0
        for number in range(2 * int(rng.integers(1, 4))):
            if number % 2 == 0:
                sizes = rng.integers(2, 8, 2)
                if offset + sizes.sum() > length:
                    break
            size = int(sizes[number % 2])
            documents[row, offset : offset + size] = number
            start = offset + int(rng.integers(0, size))
            labels[row, start : offset + size] = rng.integers(4, VOCABULARY, offset + size - start)
            offset += size
        tokens[row, offset:] = 0
    return SequenceRows(tokens, documents, labels)


def log_probability(model: LanguageModel, tokens: list[int], labels: list[int]) -> torch.Tensor:
    """Log probability of the labels of one answer, which is the whole input of the model."""
    logits = model(torch.tensor([tokens]), BatchContext(training=False))[0]
    logp = functional.log_softmax(logits, -1)
    return sum((logp[position, label] for position, label in enumerate(labels) if label >= 0), start=logp.sum() * 0)


def plain(model: LanguageModel, rows: SequenceRows) -> tuple[torch.Tensor, int, int]:
    loss, number, right = torch.zeros((), dtype=torch.float64), 0, 0
    for tokens, documents, labels in zip(*(field.tolist() for field in rows), strict=True):
        for first in range(0, max(documents) + 1, 2):
            gains = []
            for answer in (first, first + 1):
                positions = [position for position, document in enumerate(documents) if document == answer]
                inputs = [tokens[position] for position in positions], [labels[position] for position in positions]
                with torch.no_grad(), model.without_adapters():
                    before = log_probability(model, *inputs)
                gains.append(log_probability(model, *inputs) - before)
            loss = loss - functional.logsigmoid(BETA * (gains[0] - gains[1]))
            number, right = number + 1, right + int(gains[0] > gains[1])
    return loss, number, right


@pytest.mark.sample(5)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_loss_and_gradients_are_those_of_the_formula(attention: str, seed: int):
    model, rows = model_of(attention, seed), rows_of(seed, 5, 24)
    batch = SequencesBatch.from_part(rows, BatchContext(training=False, rows_per_group=1), Layout.single())
    result = preference_loss_of(model, batch, BETA)
    result.objective.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    loss, number, right = plain(model, rows)
    loss.backward()
    torch.testing.assert_close(result.objective, loss, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(result.nll, loss, rtol=1e-11, atol=1e-12)
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert gradients.keys() == expected.keys() == {name for name in gradients if "_lora_" in name}
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-9, atol=1e-12, msg=name)
    preferences = preferences_of(model, batch, BETA)
    assert (int(preferences.num_pairs), int(preferences.num_right)) == (number, right)
    torch.testing.assert_close(preferences.loss, loss, rtol=1e-11, atol=1e-12)
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
    hidden_states = torch.randn(10, 6, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    table = torch.randn(9, 6, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.tensor([0, -1, 3, 8, -1, 2, 2, 1, 7, -1])
    weight = torch.linspace(-1, 1, 10, dtype=torch.float64)
    nll = token_nll(hidden_states, table, labels, -1)
    (nll.double() * weight).sum().backward()
    gradients = hidden_states.grad, table.grad
    wide_hidden, wide_table = (tensor.detach().double().requires_grad_() for tensor in (hidden_states, table))
    logp = functional.log_softmax(wide_hidden @ wide_table.t(), -1)
    plain = -logp.gather(1, labels.clamp(min=0)[:, None]).squeeze(1) * (labels >= 0)
    (plain * weight).sum().backward()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(nll.double(), plain, rtol=tolerance, atol=tolerance)
    for actual, expected in zip(gradients, (wide_hidden.grad, wide_table.grad), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)

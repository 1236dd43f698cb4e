"""Losses over pairs of answers against their formulas, evaluated on each answer separately, and against TRL's."""

from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from moe.data.sequences.store import SequenceRows
from moe.layers.nll import token_nll
from moe.parallel import Layout
from moe.spec import AdapterSpec, JobSpec
from moe.spec.train import LOSSES_WITH_REFERENCE, UNPAIRED_LOSSES, PreferenceLoss
from moe.tasks.batch_context import BatchContext
from moe.tasks.language import LanguageModel, build_model
from moe.tasks.language.batches import SequencesBatch
from moe.tasks.language.preference import pair_losses, preference_loss_of, preferences_of
from moe.train.checkpoint.spec_changes import state_changes
from tests.parity.language_models import ATTENTIONS, VOCABULARY, language_model, with_adapter

DROPLESS = {"router": "softmax_topk", "top_k": 2, "num_experts": 4}
BETA, MARGIN = 0.3, 0.7
LOSSES: tuple[PreferenceLoss, ...] = tuple(name for name in get_args(PreferenceLoss) if name not in UNPAIRED_LOSSES)


def job_of(loss: PreferenceLoss) -> JobSpec:
    margin = {"preference_margin": MARGIN} if loss == "simpo" else {}
    return JobSpec.parse({
        "model": {**language_model("MLA", **DROPLESS).model_dump(mode="json"), "adapter": {"rank": 2}},
        "data": {"corpus": "preference", "paths": ["/data/*.jsonl"], "max_tokens": 64},
        "train": {"num_steps": 1, "batch_tokens": 64, "preference_loss": loss, "preference_beta": BETA, **margin},
    })  # fmt: skip


def model_of(attention: str, seed: int) -> LanguageModel:
    spec = language_model(attention, **DROPLESS)
    adapter = AdapterSpec(rank=2, alpha=3.0, targets=("*",))
    model = build_model(with_adapter(spec, adapter), seed=seed, dtype=torch.float64)
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


def formula(loss: str, logp: Sequence[Tensor], reference: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """Loss of one pair, as its paper writes it (IPO per token, as in TRL)."""
    gains = [after - before for after, before in zip(logp, reference, strict=True)]
    means = [value / length for value, length in zip(logp, lengths, strict=True)]
    if loss == "dpo":
        return -torch.log(torch.sigmoid(BETA * (gains[0] - gains[1])))
    if loss == "ipo":
        return (gains[0] / lengths[0] - gains[1] / lengths[1] - 1 / (2 * BETA)) ** 2
    if loss == "simpo":
        return -torch.log(torch.sigmoid(BETA * means[0] - BETA * means[1] - MARGIN))
    odds = [mean.exp() / (1 - mean.exp()) for mean in means]
    return -means[0] - BETA * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1])))


def reward(loss: str, logp: Tensor, reference: Tensor, length: int) -> float:
    gain = logp.detach() - (reference if loss in LOSSES_WITH_REFERENCE else 0)
    return float(gain / (1 if loss == "dpo" else length))


def plain(model: LanguageModel, rows: SequenceRows, loss: str) -> tuple[Tensor, int, int]:
    total, number, right = torch.zeros((), dtype=torch.float64), 0, 0
    for tokens, documents, labels in zip(*(field.tolist() for field in rows), strict=True):
        for first in range(0, max(documents) + 1, 2):
            after, before, lengths = [], [], []
            for answer in (first, first + 1):
                positions = [position for position, document in enumerate(documents) if document == answer]
                inputs = [tokens[position] for position in positions], [labels[position] for position in positions]
                with torch.no_grad(), model.without_adapters():
                    before.append(log_probability(model, *inputs))
                after.append(log_probability(model, *inputs))
                lengths.append(sum(label >= 0 for label in inputs[1]))
            total = total + formula(loss, after, before, lengths)
            rewards = [reward(loss, *values) for values in zip(after, before, lengths, strict=True)]
            number, right = number + 1, right + int(rewards[0] > rewards[1])
    return total, number, right


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_are_those_of_the_formula(name: PreferenceLoss, attention: str, seed: int):
    model, rows, spec = model_of(attention, seed), rows_of(seed, 5, 24), job_of(name)
    batch = SequencesBatch.from_part(rows, BatchContext(training=False, rows_per_group=1), Layout.single())
    result = preference_loss_of(model, batch, spec)
    result.objective.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    loss, number, right = plain(model, rows, name)
    loss.backward()
    torch.testing.assert_close(result.objective, loss, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(result.nll, loss, rtol=1e-11, atol=1e-12)
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert gradients.keys() == expected.keys() == {name for name in gradients if "_lora_" in name}
    for parameter, gradient in expected.items():
        torch.testing.assert_close(gradients[parameter], gradient, rtol=1e-9, atol=1e-12, msg=parameter)
    preferences = preferences_of(model, batch, spec)
    assert (int(preferences.num_pairs), int(preferences.num_right)) == (number, right)
    torch.testing.assert_close(preferences.loss, loss, rtol=1e-11, atol=1e-12)
    assert number >= 5


def trl_dpo(name: str, logp_P2: Tensor, reference_P2: Tensor, num_tokens_P2: Tensor) -> float:
    """Mean loss of `DPOTrainer`, whose model here only returns the log-probabilities of its tokens: an answer's sum
    on its first one."""
    answers = torch.cat(logp_P2.unbind(1))  # all preferred answers, then all rejected ones
    mask = torch.arange(9)[None] < torch.cat(num_tokens_P2.unbind(1))[:, None]
    log_probs = torch.zeros(len(answers), 9, dtype=torch.float64)
    log_probs[:, 0] = answers
    figures = torch.zeros_like(log_probs)
    outputs = SimpleNamespace(log_probs=log_probs, entropy=figures, mean_logits=figures, is_top1=figures.bool())
    completion_mask = functional.pad(mask, (1, 0)).long()
    references = reference_P2.unbind(1)
    inputs = {
        "input_ids": completion_mask, "attention_mask": completion_mask, "completion_mask": completion_mask,
        "ref_chosen_logps": references[0], "ref_rejected_logps": references[1],
    }  # fmt: skip
    accelerator = SimpleNamespace(device="cpu", gather=lambda value: value, gather_for_metrics=lambda value: value)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=accelerator, aux_loss_enabled=False, ld_alpha=None,
        precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=[{"dpo": "sigmoid"}.get(name, name)],
        loss_weights=[1.0], beta=BETA, use_weighting=False, _metrics={"train": defaultdict(list)},
        _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    from trl import DPOTrainer  # seconds

    return float(DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False))


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_pairs_are_those_of_trl(name: PreferenceLoss, monkeypatch: pytest.MonkeyPatch) -> None:
    """ORPO's first term, the preferred answer's likelihood, is not in TRL's `odds_ratio_loss`."""
    generator = torch.Generator().manual_seed(3)
    num_tokens_P2 = torch.randint(1, 9, (6, 2), generator=generator).double()
    logp_P2, reference_P2 = (
        -num_tokens_P2 * torch.rand(6, 2, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    scores_P2 = logp_P2 - reference_P2 if name in LOSSES_WITH_REFERENCE else logp_P2
    losses, _ = pair_losses(scores_P2, num_tokens_P2, job_of(name))
    if name in LOSSES_WITH_REFERENCE:
        assert float(losses.mean()) == pytest.approx(trl_dpo(name, logp_P2, reference_P2, num_tokens_P2), rel=1e-12)
        return
    means = (logp_P2 / num_tokens_P2).unbind(1)
    accelerator = SimpleNamespace(device="cpu")
    trainer = SimpleNamespace(
        beta=BETA, simpo_gamma=MARGIN, label_smoothing=0.0, alpha=0.0, loss_type=name, accelerator=accelerator
    )
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")  # warns of the module's state, and warnings are errors
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    if name == "simpo":
        theirs = CPOTrainer.cpo_loss(trainer, *means)[0]
        torch.testing.assert_close(losses, theirs, rtol=1e-12, atol=0)
    else:
        theirs = ORPOTrainer.odds_ratio_loss(trainer, *means)[0]
        torch.testing.assert_close(losses + means[0], -theirs.double(), rtol=1e-5, atol=1e-6)  # theirs in float32


def test_a_reference_that_is_drawn_keeps_its_seed():
    job = job_of("dpo").model_dump(mode="json")
    job["model"]["adapter"] = None
    for upcycled, seed, paths in ((None, 1, ["train.seed"]), (None, 0, []), ("/models/base", 1, [])):
        before, now = (JobSpec.parse({**job, "model": {**job["model"], "from": upcycled},
                                      "train": {**job["train"], "seed": number}}) for number in (0, seed))  # fmt: skip
        assert [problem.path for problem in state_changes(before, now)] == paths


def test_a_batch_without_rows_has_no_loss():
    empty = SequenceRows(np.zeros((0, 6), np.int64), np.zeros((0, 6), np.int32), np.zeros((0, 6), np.int64))
    batch = SequencesBatch.from_part(empty, BatchContext(rows_per_group=1), Layout.single())
    losses = preference_loss_of(model_of(next(iter(ATTENTIONS)), 0), batch, job_of("dpo"))
    assert float(losses.objective.detach()) == float(losses.nll) == 0
    losses.objective.backward()


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_nll_of_each_token_and_its_gradients(dtype: torch.dtype, cap: float | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("moe.layers.nll.loss_tokens", lambda *_: 3)
    generator = torch.Generator().manual_seed(1)
    hidden_states = torch.randn(10, 6, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    table = torch.randn(9, 6, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.tensor([0, -1, 3, 8, -1, 2, 2, 1, 7, -1])
    weight = torch.linspace(-1, 1, 10, dtype=torch.float64)
    nll = token_nll(hidden_states, table, labels, -1, cap=cap)
    (nll.double() * weight).sum().backward()
    gradients = hidden_states.grad, table.grad
    wide_hidden, wide_table = (tensor.detach().double().requires_grad_() for tensor in (hidden_states, table))
    logits = wide_hidden @ wide_table.t()
    logp = functional.log_softmax(logits if cap is None else cap * torch.tanh(logits / cap), -1)
    plain = -logp.gather(1, labels.clamp(min=0)[:, None]).squeeze(1) * (labels >= 0)
    (plain * weight).sum().backward()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(nll.double(), plain, rtol=tolerance, atol=tolerance)
    for actual, expected in zip(gradients, (wide_hidden.grad, wide_table.grad), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)

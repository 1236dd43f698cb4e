"""Losses over answers with a label against their formulas, evaluated on each answer separately, and against TRL's."""

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moe.data.sequences import SequenceBatchPart
from moe.data.sequences.store import SequenceRows
from moe.data.sequences.unpaired import UnpairedPart, mismatched_rows
from moe.parallel import Layout
from moe.spec import JobSpec
from moe.spec.train import UNPAIRED_LOSSES, PreferenceLoss
from moe.tasks.batch_context import BatchContext
from moe.tasks.language import LanguageModel
from moe.tasks.language.batches import SequencesBatch
from moe.tasks.language.unpaired_preference import (
    answer_losses,
    kl_of,
    kl_sums,
    unpaired_preference_loss_of,
    unpaired_preferences_of,
    with_kl,
)
from tests.parity.language_models import ATTENTIONS, VOCABULARY, language_model
from tests.unit.test_preference import DROPLESS, log_probability, model_of

BETA, WEIGHTS = 0.3, {True: 1.25, False: 0.5}


def job_of(loss: str, **train: Any) -> JobSpec:
    return JobSpec.parse({
        "model": {**language_model("MLA", **DROPLESS).model_dump(mode="json"), "adapter": {"rank": 2}},
        "data": {"corpus": "unpaired_preference", "paths": ["/data/*.jsonl"], "max_tokens": 64},
        "train": {
            "num_steps": 1, "batch_tokens": 128, "preference_loss": loss, "preference_beta": BETA,
            "desirable_weight": WEIGHTS[True], "undesirable_weight": WEIGHTS[False], **train,
        },
    })  # fmt: skip


Answer = tuple[list[int], list[int], list[int]]
"""(prompt, tokens of the completion, labels from the prompt's last token on)."""


def random_answers(seed: int, num_rows: int, length: int) -> list[list[Answer]]:
    """Answers of each row; those of the first and the third are alone, and the first fills its row."""
    rng = np.random.default_rng(seed)

    def ids(number: int) -> list[int]:
        return rng.integers(4, VOCABULARY, number).tolist()

    rows = []
    for row in range(num_rows):
        answers = list[Answer]()
        free = length
        for _ in range(1 if row in (0, 2) else 6):
            num_prompt, num_more = (int(number) for number in rng.integers(1, 6, 2))
            num_more = length - num_prompt if row == 0 else num_more - 1
            if num_prompt + num_more > free:
                break
            free -= num_prompt + num_more
            unlearned = rng.random(num_more + 1) < 0.3
            unlearned[0] = False
            labels = np.where(unlearned, -1, ids(num_more + 1)).tolist()
            answers.append((ids(num_prompt), ids(num_more), labels))
        rows.append(answers)
    return rows


def rows_of(answers: list[list[Answer]], length: int) -> SequenceRows:
    shape = (len(answers), length)
    rows = SequenceRows(np.zeros(shape, np.int64), np.full(shape, -1, np.int32), np.full(shape, -1))
    for row, row_answers in enumerate(answers):
        start = 0
        for number, (prompt, more, labels) in enumerate(row_answers):
            place = slice(start, start + len(prompt) + len(more))
            rows.tokens[row, place] = prompt + more
            rows.documents[row, place] = number
            rows.labels[row, start + len(prompt) - 1 : place.stop] = labels
            start = place.stop
    return rows


def mismatched(answers: list[list[Answer]], length: int) -> list[list[Answer]]:
    """Each prompt with the completion before it, in TRL's way: that of the last one for the first."""
    result = []
    for row, row_answers in enumerate(answers):
        others = [row_answers[-1], *row_answers[:-1]] if len(row_answers) > 1 else [answers[row - 1][-1]]
        result.append([
            (prompt, more[: length - len(prompt)], labels[: length - len(prompt) + 1])
            for (prompt, _, _), (_, more, labels) in zip(row_answers, others, strict=True)
        ])  # fmt: skip
    return result


LENGTH = 24


@pytest.mark.parametrize("seed", range(5))
def test_mismatched_rows_are_prompts_with_the_completions_before_them(seed: int) -> None:
    answers = random_answers(seed, 7, LENGTH)
    rows = rows_of(answers, LENGTH)
    actual = mismatched_rows(rows, SequenceRows(*(np.roll(field, 1, 0) for field in rows)))
    expected = rows_of(mismatched(answers, LENGTH), LENGTH)
    for field, expected_field in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(field, expected_field)
    num_tokens = (rows.documents >= 0).sum(1)
    is_alone = rows.documents.max(1) == 0
    assert is_alone.any()
    np.testing.assert_array_equal((actual.documents >= 0).sum(1)[~is_alone], num_tokens[~is_alone])


def batch_of(answers: list[list[Answer]], desirable: np.ndarray) -> SequencesBatch:
    rows = rows_of(answers, LENGTH)
    others = mismatched_rows(rows, SequenceRows(*(np.roll(field, 1, 0) for field in rows)))
    part = SequenceBatchPart(0, *rows, UnpairedPart(desirable, others))
    return SequencesBatch.from_part(part, BatchContext(training=False, rows_per_group=1), Layout.single())


def log_ratio(model: LanguageModel, answer: Answer) -> Tensor:
    prompt, more, labels = answer
    inputs = prompt + more, [-1] * (len(prompt) - 1) + labels
    with torch.no_grad(), model.without_adapters():
        before = log_probability(model, *inputs)
    return log_probability(model, *inputs) - before


def plain(
    model: LanguageModel, answers: list[list[Answer]], desirable: np.ndarray, loss: str
) -> tuple[Tensor, float, dict[bool, float]]:
    """(loss, KL estimate, sums of rewards by label), as the papers write them."""
    others = [answer for row in mismatched(answers, LENGTH) for answer in row]
    with torch.no_grad():
        kl = max(0.0, float(sum(log_ratio(model, answer) for answer in others)) / len(others))
    total, rewards = torch.zeros((), dtype=torch.float64), {True: 0.0, False: 0.0}
    for row, row_answers in enumerate(answers):
        for number, answer in enumerate(row_answers):
            is_desirable, gain = bool(desirable[row, number]), log_ratio(model, answer)
            rewards[is_desirable] += BETA * float(gain.detach())
            if loss == "kto":
                value = 1 - torch.sigmoid(BETA * (gain - kl if is_desirable else kl - gain))
            else:
                value = 1 - torch.sigmoid(BETA * gain) if is_desirable else torch.sigmoid(BETA * gain)
            total = total + WEIGHTS[is_desirable] * value
    return total, kl, rewards


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", UNPAIRED_LOSSES)
def test_loss_and_gradients_are_those_of_the_formula(name: PreferenceLoss, attention: str, seed: int) -> None:
    model, spec = model_of(attention, seed), job_of(name)
    answers = random_answers(seed, 4, LENGTH)
    desirable = np.random.default_rng(seed).random((4, max(map(len, answers)))) < 0.5
    batch = batch_of(answers, desirable)
    if name == "kto":
        (batch,) = with_kl(model, [batch], spec, Layout.single())
    result = unpaired_preference_loss_of(model, batch, spec)
    result.objective.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    loss, kl, rewards = plain(model, answers, desirable, name)
    loss.backward()
    for value in (result.objective, result.nll):
        torch.testing.assert_close(value, loss, rtol=1e-11, atol=1e-12)
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert gradients.keys() == expected.keys() == {name for name in gradients if "_lora_" in name}
    for parameter, gradient in expected.items():
        torch.testing.assert_close(gradients[parameter], gradient, rtol=1e-9, atol=1e-12, msg=parameter)
    if name == "kto":
        assert float(result.numbers["kl"]) == pytest.approx(kl, rel=1e-11, abs=1e-12)
    counts = {True: 0, False: 0}
    for row, row_answers in enumerate(answers):
        for number in range(len(row_answers)):
            counts[bool(desirable[row, number])] += 1
    for kind, label in (("reward_desirable", True), ("reward_undesirable", False)):
        assert result.means[kind].tolist() == pytest.approx([rewards[label], counts[label]], rel=1e-11, abs=1e-12)
    sums = unpaired_preferences_of(model, batch, spec)
    torch.testing.assert_close(sums.loss, loss, rtol=1e-11, atol=1e-12)
    assert int(sums.num_answers) == sum(map(len, answers)) >= 4


def test_the_kl_estimate_is_that_of_all_micro_batches_and_at_least_zero() -> None:
    model, spec = model_of("MLA", 1), job_of("kto")
    answers = random_answers(3, 4, LENGTH)
    batches = [batch_of(part, np.ones((2, 6), np.bool_)) for part in (answers[:2], answers[2:])]
    sums = [kl_sums(model, batch, spec) for batch in batches]
    assert sum(float(number) for _, number in sums) == sum(map(len, answers))
    expected = max(0.0, sum(float(total) for total, _ in sums) / sum(float(number) for _, number in sums))
    assert [float(batch.kl) for batch in with_kl(model, batches, spec, Layout.single())] == [expected] * 2
    assert [float(kl_of(torch.tensor(total), torch.tensor(2.0))) for total in (-3.0, 3.0)] == [0.0, 1.5]


def test_a_batch_without_rows_has_no_loss() -> None:
    model, spec = model_of(next(iter(ATTENTIONS)), 0), job_of("kto")
    empty = SequenceRows(np.zeros((0, 6), np.int64), np.zeros((0, 6), np.int32), np.zeros((0, 6), np.int64))
    part = SequenceBatchPart(0, *empty, UnpairedPart(np.zeros((0, 0), np.bool_), empty))
    batch = SequencesBatch.from_part(part, BatchContext(rows_per_group=1), Layout.single())
    (batch,) = with_kl(model, [batch], spec, Layout.single())
    losses = unpaired_preference_loss_of(model, batch, spec)
    assert float(losses.objective.detach()) == float(losses.nll) == float(batch.kl) == 0
    losses.objective.backward()


class Outputs:
    """Outputs of a model of TRL's: an answer's log-probability on its first token."""

    def __init__(self, logp_P: Tensor) -> None:
        self.log_probs = torch.zeros(len(logp_P), 3, dtype=torch.float64)
        self.log_probs[:, 0] = logp_P
        self.entropy = self.mean_logits = torch.zeros_like(self.log_probs)


def trl_kto(name: str, log_probs: dict[str, Tensor], desirable: Tensor, other_rank_kl: float | None) -> float:
    """Loss of `KTOTrainer` whose models return these log-probabilities; `other_rank_kl`: a second rank's mean."""
    from trl import KTOTrainer  # seconds

    mask = torch.ones(len(desirable), 4, dtype=torch.int64)
    inputs = {
        "input_ids": mask, "attention_mask": mask, "completion_mask": mask, "label": desirable,
        "KL_input_ids": mask, "KL_attention_mask": mask, "KL_completion_mask": mask,
        "ref_logps": log_probs["reference"], "ref_KL_logps": log_probs["reference_kl"],
    }  # fmt: skip

    def gather(value: Tensor) -> Tensor:
        is_kl = other_rank_kl is not None and value.shape == () and value.dtype == torch.float64
        return torch.stack((value, value.new_tensor(other_rank_kl))) if is_kl else value

    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), precompute_ref_logps=True, aux_loss_enabled=False, beta=BETA,
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=gather), calculate_KL=name == "kto",
        loss_type=name, desirable_weight=WEIGHTS[True], undesirable_weight=WEIGHTS[False],
        _metrics={"train": defaultdict(list)}, _total_train_tokens=0, _tp_size=1,
        _compute_kl_logps=lambda *_: log_probs["kl"],
    )  # fmt: skip
    return float(KTOTrainer._compute_loss(trainer, lambda **_: Outputs(log_probs["policy"]), inputs, False))


@pytest.mark.slow
@pytest.mark.parametrize("other_rank_kl", [None, 0.25, -20.0])
@pytest.mark.parametrize("name", UNPAIRED_LOSSES)
def test_losses_are_those_of_trl(name: PreferenceLoss, other_rank_kl: float | None) -> None:
    generator = torch.Generator().manual_seed(5)
    log_probs = {
        kind: -10 * torch.rand(8, generator=generator, dtype=torch.float64)
        for kind in ("policy", "reference", "kl", "reference_kl")
    }
    desirable = torch.rand(8, generator=generator) < 0.6
    gains = log_probs["kl"] - log_probs["reference_kl"]
    total, number = float(gains.sum()), 8.0
    if other_rank_kl is not None:  # as many answers on the second rank
        total, number = total + 8 * other_rank_kl, 16.0
    kl = kl_of(*torch.tensor([total, number], dtype=torch.float64))
    losses, rewards = answer_losses(log_probs["policy"] - log_probs["reference"], desirable, kl, job_of(name))
    assert float(losses.mean()) == pytest.approx(trl_kto(name, log_probs, desirable, other_rank_kl), rel=1e-12)
    torch.testing.assert_close(rewards, BETA * (log_probs["policy"] - log_probs["reference"]))
    assert (float(kl) == 0) == (other_rank_kl == -20.0)


def test_the_reference_is_evaluated_like_the_model() -> None:
    """A frozen copy as the reference gives what the base without its adapter gives."""
    model, spec = model_of("MLA", 2), job_of("kto")
    copy = model_of("MLA", 2)
    for name, parameter in copy.named_parameters():
        if name.endswith("_lora_b"):
            parameter.data.zero_()
    answers = random_answers(4, 3, LENGTH)
    batch = batch_of(answers, np.ones((3, 6), np.bool_))
    (own,), (frozen,) = (with_kl(model, [batch], spec, Layout.single(), reference) for reference in (None, copy))
    assert float(own.kl) == pytest.approx(float(frozen.kl), rel=1e-12)
    losses = [
        unpaired_preference_loss_of(model, replace(batch, kl=own.kl), spec, reference).nll for reference in (None, copy)
    ]
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)

"""A task that the product does not have, run by the trainer: predict the letter after each letter of a text."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from moe.layers import MoELayer, TokenContext
from moe.parallel import Layout, apply, json_collectives
from moe.plan.placement import Placement
from moe.records import HeldOutResult, JsonRecord
from moe.routing import BatchCounts
from moe.spec import JobSpec
from moe.tasks.task import Loss, RankBatch, Task
from moe.train.loop import train
from moe.train.recorder import MemoryRecorder
from tests.parity.gloo_ranks import Pools
from tests.parity.trajectory import Degrees
from tests.unit.train_runs import RequestAfter, course

TEXT, GROUPS, LENGTH, STEPS = "she sells sea shells by the sea shore; ", 4, 16, 12
LETTERS = sorted(set(TEXT))
JOB = JobSpec.parse({
    "model": {"kind": "language", "model_dim": 8, "num_layers": 1, "vocab_size": len(LETTERS),
              "attention": {"kind": "grouped_query", "num_heads": 1, "num_kv_heads": 1, "head_dim": 8},
              "moe": {"num_experts": 4, "hidden_dim": 16, "group_tokens": LENGTH, "capacity_factor": 1.0}},
    "data": {"corpus": "synthetic", "max_tokens": LENGTH},
    "train": {"num_steps": STEPS, "batch_tokens": GROUPS * LENGTH, "dtype": "float64", "evaluation": {"every_steps": 4},
              "optimizer": {"name": "adamw", "peak_lr": 0.1}, "schedule": {"warmup_steps": 0, "decay": "constant"}},
    "checkpoint": {"every_steps": 2, "keep": 9},
})  # fmt: skip
LETTERS_FILE = {"letters.txt": "".join(LETTERS).encode()}
DATA = SimpleNamespace(key="shells", tokenizer_files=lambda: LETTERS_FILE, carried_files=dict)
Rows = tuple[Tensor, TokenContext]  # letters [G, S + 1]: those read, and the one after the last


class Guesser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(len(LETTERS), 8), nn.Linear(8, len(LETTERS))
        self.moe = MoELayer(JOB.model.moe, layer=5)  # type: ignore[arg-type]

    def forward(self, letters: Tensor, tokens: TokenContext) -> Tensor:
        x = self.embedding(letters)
        return self.head(x + self.moe(x, tokens)[0])


@dataclass(frozen=True)
class Report(JsonRecord):
    nats: float | None


class NextLetter(Task[Any, Rows]):
    def check_data(self, roots: object) -> tuple[str, ...]:
        return ()

    def prepare(self, cache: object, **_: object) -> Any:
        return DATA

    def build_model(self, layout: Layout) -> nn.Module:
        torch.manual_seed(self.spec.train.seed)
        model, spread = Guesser().double(), {True: {"splits": (("expert", 0),)}, False: {}}
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        placements = [Placement(parameter=n, shape=shapes[n], **spread[".experts." in n]) for n in shapes]
        return apply(model, placements, layout, {"moe": "layer 5", "": "the model"})

    def batches(self, data: Any, plan: Any, layout: Layout) -> Any:
        return lambda step: RankBatch(step, [self._rows(step, layout)], GROUPS * LENGTH, GROUPS * LENGTH)

    def dummy_batch(self, num_rows: int, num_tokens: int, layout: Layout) -> Rows:
        return torch.zeros(num_rows, num_tokens + 1, dtype=torch.int64), TokenContext()

    def loss(self, model: nn.Module, micro_batch: Rows) -> Loss:
        (letters, tokens), labels = micro_batch, micro_batch[0][:, 1:].flatten()
        logits = model(letters[:, :-1], tokens).flatten(0, 1)
        return Loss(*[functional.cross_entropy(logits, labels, reduction="sum")] * 2)

    def measure_held_out(self, model: nn.Module, layout: Layout, data: Any) -> HeldOutResult:
        nll = torch.no_grad()(self.loss)(model, self._rows(999, layout, training=False)).nll
        (nats,) = json_collectives.all_reduce_sum(float(nll) / layout.degree("tensor"))  # tensor ranks have equal sums
        return HeldOutResult({"text": nats / (GROUPS * LENGTH)})

    def evaluate(self, model: nn.Module, layout: Layout, data: Any) -> Report:
        return Report(self.measure_held_out(model, layout, data).losses["text"])

    def _rows(self, step: int, layout: Layout, training: bool = True) -> Rows:
        letters, local_groups = (
            torch.tensor([LETTERS.index(letter) for letter in 2 * TEXT]),
            layout.local_groups(GROUPS),
        )
        first = torch.randint(len(TEXT), (GROUPS, 1), generator=torch.Generator().manual_seed(step))
        rows = letters[first + torch.arange(LENGTH + 1)][local_groups.start : local_groups.stop]
        ids = torch.arange(GROUPS * LENGTH).view(GROUPS, LENGTH)[local_groups.start : local_groups.stop]
        counts = BatchCounts(GROUPS, GROUPS, GROUPS * LENGTH)
        return rows, TokenContext(ids, None, step, 0, training, LENGTH, counts)


def run(degrees: Degrees, storage: str, group: int = 0, steps: int = STEPS + 1) -> tuple[str, list, object]:
    """(kind of outcome, records of its steps, report) of a run that is asked to pause after some steps"""
    layout, task, recorder = Layout.build(plan := degrees.plan(GROUPS)), NextLetter(JOB), MemoryRecorder()
    outcome = train(task, plan, layout, data=DATA, storage=storage, cache=Path(storage), attempt=1, group=group,
                    recorder=recorder, control=RequestAfter("pause", steps))  # fmt: skip
    layout.close()
    return outcome.kind, course(recorder), outcome.report


@pytest.mark.slow
def test_a_task_of_one_file_is_trained_saved_and_resumed(ranks: Pools, tmp_path: Path) -> None:
    (kind, all_steps, report), _ = ranks[2].run(run, Degrees(expert=2), f"{tmp_path}/whole")
    assert (kind, len(all_steps), report) == ("succeeded", STEPS, Report(all_steps[-1]["held_out"]["text"]))
    assert all_steps[-1]["loss"] < 0.7 * all_steps[0]["loss"]
    (kind, first, _), _ = ranks[2].run(run, Degrees(expert=2), f"{tmp_path}/parts", 0, 5)
    assert (kind, len(first)) == ("paused", 5)
    assert next(tmp_path.glob("parts/checkpoints/*5.a1.g0/*/letters.txt")).read_text() == "".join(LETTERS)
    (kind, rest, resumed_report), _ = ranks[2].run(run, Degrees(expert=2), f"{tmp_path}/parts", 1)
    assert (kind, first + rest, resumed_report) == ("succeeded", all_steps, report)
    _, single_process_steps, _ = run(Degrees(), f"{tmp_path}/alone")
    (_, tensor, _), *_ = ranks[2].run(run, Degrees(expert=2, tensor=2), f"{tmp_path}/tensor")
    expected, *other_losses = ([step["loss"] for step in steps] for steps in (all_steps, single_process_steps, tensor))
    assert other_losses == [pytest.approx(expected, rel=1e-10)] * 2

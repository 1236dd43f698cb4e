"""KTO against TRL's `KTOTrainer`: its data preparation, its KL completions, its models and its loss."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe.data.sequences import SequenceBatchPart, prepare
from moe.data.sequences.unpaired import UnpairedPart
from moe.parallel import Layout
from moe.spec import JobSpec
from moe.tasks.batch_context import BatchContext
from moe.tasks.build import build_task
from moe.tasks.language import LanguageTask
from moe.tasks.language.batches import SequencesBatch
from moe.tasks.language.pretrained import model_tokenizer, with_template
from moe.tasks.language.unpaired_preference import unpaired_preference_loss_of, with_kl
from tests.interchange import tiny
from tests.interchange.test_chat_jobs import chat_job
from tests.unit import chats

BETA, WEIGHTS = 0.4, (1.5, 0.5)
MAX_TOKENS = 2000


def records(kind: str) -> list[dict[str, Any]]:
    rng = random.Random(kind)
    conversations = [chats.conversation(rng, chats.STRUCTURES["llama"])["messages"][:2] for _ in range(5)]
    prompts = [[{"role": "user", "content": messages[0]["content"]}] for messages in conversations]
    answers = [f"because {number} of {'very ' * number}much" for number in range(10)]
    if kind == "pairs":
        return [
            {"prompt": prompt, "chosen": [{"role": "assistant", "content": answers[number]}],
             "rejected": [{"role": "assistant", "content": answers[number + 5]}]}
            for number, prompt in enumerate(prompts)
        ]  # fmt: skip
    return [
        {"prompt": prompt, "completion": [{"role": "assistant", "content": answers[number]}], "label": number % 3 > 0}
        for number, prompt in enumerate(prompts)
    ]


def trl_figures(folder: Path, reference: Path, rows: list[dict[str, Any]], loss: str) -> tuple[float, dict[str, float]]:
    """(loss, metrics) of the first batch, which has all records."""
    import datasets
    import transformers
    from trl import KTOConfig, KTOTrainer

    models = [
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
        for path in (folder, reference)
    ]
    config = KTOConfig(
        output_dir=str(folder / "out"), loss_type=loss, beta=BETA, desirable_weight=WEIGHTS[0],
        undesirable_weight=WEIGHTS[1], per_device_train_batch_size=10, max_length=MAX_TOKENS, bf16=False,
        use_cpu=True, report_to=[], gradient_checkpointing=False, router_aux_loss_coef=0.0,
    )  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    trainer = KTOTrainer(
        models[0], models[1], config, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
    )
    (batch,) = trainer.get_train_dataloader()
    value = trainer.compute_loss(trainer.model, batch)
    metrics = {name: values[-1] for name, values in trainer._metrics["eval"].items()}
    return float(value.detach()), metrics


# Warnings of TRL, datasets and transformers themselves.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("kind", ["labels", "pairs"])
def test_a_batch_has_the_loss_and_rewards_of_trl(kind: str, loss: str, tmp_path: Path) -> None:
    """All records are one row, as TRL's are one device's batch. transformers has norms, rotary tables and routers in
    float32, and TRL logits."""
    rows = records(kind)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    expanded = chat_job(
        tmp_path / "reference", train={"preference_loss": loss, "batch_tokens": 2 * MAX_TOKENS, "dtype": "float64",
                                       "preference_beta": BETA, "desirable_weight": WEIGHTS[0],
                                       "undesirable_weight": WEIGHTS[1]},
        model={"moe": {"group_tokens": MAX_TOKENS}},
        data={"corpus": "unpaired_preference", "paths": [f"{tmp_path}/data/*"], "max_tokens": MAX_TOKENS,
              "held_out": 0.0},
    )  # fmt: skip
    spec = JobSpec.parse({**expanded, "model": {**expanded["model"], "from": str(tmp_path / "reference")}})
    policy = tmp_path / "policy"
    (tmp_path / "reference").rename(policy)
    tiny.folder_of(tiny.their_model("mixtral", vocab_size=480, seed=1), policy, dtype=torch.float32)
    chat_job(tmp_path / "reference")
    task = build_task(spec)
    assert isinstance(task, LanguageTask)
    layout, roots = Layout.single(), [str(tmp_path)]
    task.begin_reference(layout, roots)
    tokenizer = with_template(model_tokenizer(spec.model, roots), spec.data, roots)
    store = prepare(spec.data, spec.model.vocab_size, tmp_path / "cache", tokenizer, roots).train
    assert store.num_rows == 1
    (tmp_path / "reference").rename(tmp_path / "kept")
    policy.rename(tmp_path / "reference")
    model = task.build_model(layout)
    task.begin(model, layout, roots)
    (tmp_path / "reference").rename(policy)
    index = np.array([0])
    unpaired = UnpairedPart.from_rows(store, index, index, estimates_kl=spec.estimates_kl)
    part = SequenceBatchPart(0, *store.rows(index), unpaired)
    batch = SequencesBatch.from_part(part, BatchContext(training=False, rows_per_group=1), layout)
    if spec.estimates_kl:
        (batch,) = with_kl(model, [batch], spec, layout, task._reference)
    result = unpaired_preference_loss_of(model, batch, spec, task._reference)
    expected, metrics = trl_figures(policy, tmp_path / "kept", rows, loss)
    num_answers = 10 if kind == "pairs" else 5
    assert float(result.nll) / num_answers == pytest.approx(expected, rel=1e-4)
    assert expected != pytest.approx(0.5, rel=1e-3)
    for ours, theirs in (("reward_desirable", "rewards/chosen"), ("reward_undesirable", "rewards/rejected")):
        total, number = result.means[ours].tolist()
        assert total / number == pytest.approx(metrics[theirs], rel=1e-4)
    if spec.estimates_kl:
        assert float(batch.kl) == pytest.approx(metrics["kl"], rel=1e-4)

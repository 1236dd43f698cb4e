"""A whole training step of a small decoder: ours, and transformers' with the same config and weights, in turns.

Our step is that of training: the task's loss over a batch, backward pass, clipping, fused AdamW. The other is what a
user of transformers writes: the model with labels and grouped products of experts, backward pass, `clip_grad_norm_`,
fused AdamW, and autocast for bfloat16. With `--adapter-rank` both train only adapters on attention and experts, with
PEFT on transformers' side. Both start from the same loss, which is printed. Ratios are medians over pairs of rounds, by
the clock and by processor time, on all cores and on one.
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.decoders import (
    CONFIG,
    Case,
    Round,
    RoundResult,
    Side,
    in_turns,
    our_spec,
    ratio,
    save_weights,
    their_model,
)

ROWS, LENGTH = 4, 512
LEARNING_RATE, CLIP_NORM = 1e-4, 1.0
LIMIT, AIM = 1.1, 1.3
ROUNDS = 9


ADAMW: dict[str, Any] = {
    "name": "adamw", "peak_lr": LEARNING_RATE, "weight_decay": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8,
}  # fmt: skip


def shardyard_round(case: Case, optimizer: dict[str, Any] = ADAMW, num_micro_batches: int = 1) -> Round:
    import torch

    from moe.interchange import load_weights
    from moe.parallel import Layout
    from moe.spec import JobSpec
    from moe.storage.folder import Folder
    from moe.tasks.batch_context import BatchContext, label_positions
    from moe.tasks.build import build_task
    from moe.tasks.language.batches import IGNORE_INDEX, SequencesBatch
    from moe.tasks.language.model import LanguageModel
    from moe.tasks.task import RankBatch
    from moe.train import expert_costs
    from moe.train.signals import Signals
    from moe.train.step import step
    from moe.train.train_state import TrainState

    spec = JobSpec.parse({
        "name": "step",
        "model": our_spec(case.folder).model_dump(mode="json", exclude_unset=True, by_alias=True),
        "data": {
            "corpus": "documents", "max_tokens": LENGTH, "sources": [{"name": "none", "paths": ["/none/*.jsonl"]}],
        },
        "train": {
            "num_steps": 1000, "batch_tokens": num_micro_batches * ROWS * LENGTH, "dtype": case.dtype,
            "schedule": {"decay": "constant", "warmup_steps": 0}, "clip_norm": CLIP_NORM,
            "optimizer": optimizer,
        },
        **({"adapter": {"rank": case.settings[0]}} if case.settings else {}),
    })  # fmt: skip
    layout = Layout.single()
    state = TrainState.build(build_task(spec), layout)
    model = state.model
    assert isinstance(model, LanguageModel)
    load_weights(case.folder, model, model.spec)
    with tempfile.TemporaryDirectory() as run:
        layers, cache = state.moe_layers.local_layers.values(), Path(case.folder) / "experts"
        expert_costs.decide(layers, layout.device, state.dtype, Folder(run), cache)
    tokens = _tokens()
    labels = torch.cat((tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORE_INDEX)), dim=1)
    positions = label_positions(labels.numpy(), IGNORE_INDEX, layout)
    rows = SequencesBatch(tokens, labels, BatchContext(rows_per_group=ROWS), positions)
    step_index = 0

    def run_step() -> float:
        nonlocal step_index
        num_rows = num_micro_batches * ROWS
        batch = RankBatch(step_index, [rows] * num_micro_batches, num_rows * (LENGTH - 1), num_rows * LENGTH)
        step_index += 1
        loss = step(state, batch, Signals()).record.nll
        assert loss is not None
        return loss

    return run_step


def transformers_round(case: Case) -> Round:
    import torch

    model, tokens = their_model(case.folder), _tokens()
    if case.settings:
        model = with_adapter(model, *case.settings)
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.01, fused=True)
    dtype = getattr(torch, case.dtype)

    def run_step() -> float:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return run_step


def with_adapter(model: Any, rank: int) -> Any:
    """The model with PEFT's adapters on attention and experts."""
    import peft

    experts = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    attention = [f"{name}_proj" for name in "qkvo"]
    return peft.get_peft_model(model, peft.LoraConfig(
        r=rank, lora_alpha=rank, target_modules=attention, target_parameters=experts, task_type="CAUSAL_LM",
    ))  # fmt: skip


def _tokens() -> Any:
    import torch

    return torch.randint(CONFIG["vocab_size"], (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def compare(
    folder: str, dtype: str, num_threads: int, num_rounds: int, settings: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Figures of both sides; they train adapters if `settings` has a rank."""
    case = Case(folder, dtype, num_threads, settings)
    sides = {"shardyard": Side(shardyard_round, case), "transformers": Side(transformers_round, case)}
    rounds = in_turns(sides, num_rounds)
    peaks = {name: side.end() for name, side in sides.items()}
    return {
        "dtype": dtype,
        "threads": num_threads,
        "sides": {name: _figures(rounds[name], peaks[name]) for name in sides},
        "ratio": ratio(
            [result.seconds for result in rounds["transformers"]], [result.seconds for result in rounds["shardyard"]]
        ),
        "ratio_by_processor": ratio(
            [result.processor_s for result in rounds["transformers"]],
            [result.processor_s for result in rounds["shardyard"]],
        ),
        "memory_ratio": peaks["shardyard"] / peaks["transformers"],
    }


def _figures(rounds: list[RoundResult], peak_bytes: int) -> dict[str, Any]:
    seconds = [result.seconds for result in rounds]
    return {
        "tokens_per_s": ROWS * LENGTH / statistics.median(seconds),
        "step_s": statistics.median(seconds),
        "fastest_s": min(seconds),
        "quartiles_s": statistics.quantiles(seconds, n=4)[::2],
        "processor_s": statistics.median(result.processor_s for result in rounds),
        "peak_anonymous_mib": peak_bytes / 1024**2,
        "losses": [result.answer for result in rounds],
    }


def show(row: dict[str, Any]) -> None:
    print(f"\n{row['dtype']}, {row['threads']} threads")
    for name, side in row["sides"].items():
        low, high = side["quartiles_s"]
        first, *_, last = side["losses"]
        print(
            f"  {name:<14}{side['tokens_per_s']:8.0f} tokens/s  {side['step_s']:6.2f} s a step "
            f"({low:.2f} to {high:.2f}, fastest {side['fastest_s']:.2f}), processor {side['processor_s']:6.2f} s, "
            f"{side['peak_anonymous_mib']:7.0f} MiB at the peak, loss {first:.4f} to {last:.4f}"
        )
    print(
        f"  ours is {row['ratio']:.2f} times as fast (by the processor's time "
        f"{row['ratio_by_processor']:.2f}; limit {LIMIT}, aim {AIM}), with {row['memory_ratio']:.2f} times the "
        "memory (limit 1)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({len(os.sched_getaffinity(0)), 1})[::-1])
    parser.add_argument("--adapter-rank", type=int)
    args, cases = parser.parse_args(), []
    settings = () if args.adapter_rank is None else (args.adapter_rank,)
    name = "adapter_step" if settings else "language_step"
    shape = {"config": CONFIG, "rows": ROWS, "length": LENGTH, "rounds": args.rounds, "adapter_rank": args.adapter_rank}
    with tempfile.TemporaryDirectory() as folder:
        save_weights(Path(folder))
        for threads in args.threads:
            for dtype in args.dtypes:
                cases.append(compare(folder, dtype, threads, args.rounds, settings))
                show(cases[-1])
                path = results.write(name, {**shape, "cases": cases})  # results so far, in case of an interruption
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()

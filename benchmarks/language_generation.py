"""Tokens per second of a small decoder's generation: ours, and transformers' `generate` with the same config and
weights, in turns.

Both decode greedily with a KV cache, and generate the same number of tokens for several prompts of one length; the
share of equal texts is reported. Ratios are medians over pairs of rounds, by the clock and by processor time, on all
cores and on one.
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

PROMPT_TOKENS, NEW_TOKENS = 32, 64
BATCHES = (1, 8)
LIMIT = 1.0
ROUNDS = 9


def shardyard_round(case: Case) -> Round:
    import torch

    from moe.interchange import load_weights
    from moe.spec.generation import GenerationSpec
    from moe.tasks.language import build_model
    from moe.tasks.language.generation import generate, prepare_for_decoding

    spec = our_spec(case.folder)
    model = build_model(spec, dtype=getattr(torch, case.dtype)).eval()
    load_weights(case.folder, model, spec)
    prepare_for_decoding(model)
    prompts = _prompts(case).tolist()
    generation = GenerationSpec(max_tokens=NEW_TOKENS)
    return lambda: generate(model, prompts, generation)


def transformers_round(case: Case) -> Round:
    import torch

    model, prompts = their_model(case.folder).eval().to(getattr(torch, case.dtype)), _prompts(case)

    def run() -> list[list[int]]:
        with torch.no_grad():
            token_ids = model.generate(  # type: ignore[operator]
                prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=NEW_TOKENS
            )
        new_ids: list[list[int]] = token_ids[:, PROMPT_TOKENS:].tolist()
        return new_ids

    return run


def _prompts(case: Case) -> Any:
    import torch

    generator = torch.Generator().manual_seed(1)
    return torch.randint(CONFIG["vocab_size"], (case.settings[0], PROMPT_TOKENS), generator=generator)


def compare(folder: str, dtype: str, num_rows: int, num_threads: int, num_rounds: int) -> dict[str, Any]:
    case = Case(folder, dtype, num_threads, (num_rows,))
    sides = {"shardyard": Side(shardyard_round, case), "transformers": Side(transformers_round, case)}
    rounds = in_turns(sides, num_rounds)
    for side in sides.values():
        side.end()
    shardyard_rounds, transformers_rounds = rounds["shardyard"], rounds["transformers"]
    pairs = list(zip(shardyard_rounds[0].answer, transformers_rounds[0].answer, strict=True))
    return {
        "dtype": dtype, "threads": num_threads, "rows": num_rows,
        "sides": {name: _figures(side_rounds, num_rows) for name, side_rounds in rounds.items()},
        "texts_alike": sum(a == b for a, b in pairs) / len(pairs),
        "ratio": ratio(_seconds(transformers_rounds), _seconds(shardyard_rounds)),
        "ratio_by_processor": ratio(_processor_s(transformers_rounds), _processor_s(shardyard_rounds)),
    }  # fmt: skip


def _seconds(rounds: list[RoundResult]) -> list[float]:
    return [answer.seconds for answer in rounds]


def _processor_s(rounds: list[RoundResult]) -> list[float]:
    return [answer.processor_s for answer in rounds]


def _figures(rounds: list[RoundResult], num_rows: int) -> dict[str, Any]:
    seconds, tokens = [answer.seconds for answer in rounds], num_rows * NEW_TOKENS
    return {
        "tokens_per_s": tokens / statistics.median(seconds),
        "fastest_tokens_per_s": tokens / min(seconds),
        "quartiles_s": statistics.quantiles(seconds, n=4)[::2],
        "processor_s": statistics.median(answer.processor_s for answer in rounds),
    }


def show(row: dict[str, Any]) -> None:
    print(f"\n{row['dtype']}, {row['rows']} texts at a time, {row['threads']} threads")
    for name, side in row["sides"].items():
        print(
            f"  {name:<14}{side['tokens_per_s']:8.1f} tokens/s (fastest {side['fastest_tokens_per_s']:.1f}), "
            f"processor {1e3 * side['processor_s'] / NEW_TOKENS:.1f} ms a position"
        )
    print(
        f"  ours is {row['ratio']:.2f} times as fast (by the processor's time "
        f"{row['ratio_by_processor']:.2f}; limit {LIMIT}); {row['texts_alike']:.0%} of the texts are the same",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({len(os.sched_getaffinity(0)), 1})[::-1])
    args, cases = parser.parse_args(), []
    shape = {
        "config": CONFIG, "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS, "rounds": args.rounds,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        save_weights(Path(folder))
        for threads in args.threads:
            for dtype in args.dtypes:
                for num_rows in BATCHES:
                    cases.append(compare(folder, dtype, num_rows, threads, args.rounds))
                    show(cases[-1])
                    path = results.write("language_generation", {**shape, "cases": cases})
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()

"""Tokens a second that a small decoder goes on with, token by token: ours, and transformers' `generate` of the same
config and weights, in turns.

Both take the likeliest token, keep keys and values of what came before, and make as many tokens of each of some prompts
of the same length; that they make the same ones is looked at first. Ratios are medians of those of pairs of rounds, by
the wall and by the processor's time, on all cores and on one.
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.decoders import CONFIG, Case, Found, Round, Side, in_turns, our_spec, ratio, save_weights, their_model

PROMPT_TOKENS, NEW_TOKENS = 32, 64
BATCHES = (1, 8)
LIMIT = 1.0
ROUNDS = 9


def ours(case: Case) -> Round:
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
    wanted = GenerationSpec(max_tokens=NEW_TOKENS)
    return lambda: generate(model, prompts, wanted)


def theirs(case: Case) -> Round:
    import torch

    model, prompts = their_model(case.folder).eval().to(getattr(torch, case.dtype)), _prompts(case)

    def run() -> list[list[int]]:
        with torch.no_grad():
            found = model.generate(  # type: ignore[operator]
                prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=NEW_TOKENS
            )
        made: list[list[int]] = found[:, PROMPT_TOKENS:].tolist()
        return made

    return run


def _prompts(case: Case) -> Any:
    import torch

    generator = torch.Generator().manual_seed(1)
    return torch.randint(CONFIG["vocab_size"], (case.settings[0], PROMPT_TOKENS), generator=generator)


def compared(folder: str, dtype: str, num_rows: int, num_threads: int, num_rounds: int) -> dict[str, Any]:
    case = Case(folder, dtype, num_threads, (num_rows,))
    sides = {"shardyard": Side(ours, case), "transformers": Side(theirs, case)}
    found = in_turns(sides, num_rounds)
    for side in sides.values():
        side.end()
    mine, others = found["shardyard"], found["transformers"]
    pairs = list(zip(mine[0].answer, others[0].answer, strict=True))
    return {
        "dtype": dtype, "threads": num_threads, "rows": num_rows,
        "sides": {name: _figures(each, num_rows) for name, each in found.items()},
        "texts_alike": sum(a == b for a, b in pairs) / len(pairs),
        "ratio": ratio([each.seconds for each in others], [each.seconds for each in mine]),
        "ratio_by_processor": ratio([each.processor_s for each in others], [each.processor_s for each in mine]),
    }  # fmt: skip


def _figures(rounds: list[Found], num_rows: int) -> dict[str, Any]:
    seconds, tokens = [each.seconds for each in rounds], num_rows * NEW_TOKENS
    return {
        "tokens_per_s": tokens / statistics.median(seconds),
        "fastest_tokens_per_s": tokens / min(seconds),
        "quartiles_s": statistics.quantiles(seconds, n=4)[::2],
        "processor_s": statistics.median(each.processor_s for each in rounds),
    }


def show(found: dict[str, Any]) -> None:
    print(f"\n{found['dtype']}, {found['rows']} texts at a time, {found['threads']} threads")
    for name, each in found["sides"].items():
        print(
            f"  {name:<14}{each['tokens_per_s']:8.1f} tokens/s (fastest {each['fastest_tokens_per_s']:.1f}), "
            f"processor {1e3 * each['processor_s'] / NEW_TOKENS:.1f} ms a position"
        )
    print(
        f"  ours is {found['ratio']:.2f} times as fast (by the processor's time "
        f"{found['ratio_by_processor']:.2f}; limit {LIMIT}); {found['texts_alike']:.0%} of the texts are the same",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({len(os.sched_getaffinity(0)), 1})[::-1])
    asked, found = parser.parse_args(), []
    shape = {
        "config": CONFIG, "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS, "rounds": asked.rounds,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        save_weights(Path(folder))
        for threads in asked.threads:
            for dtype in asked.dtypes:
                for num_rows in BATCHES:
                    found.append(compared(folder, dtype, num_rows, threads, asked.rounds))
                    show(found[-1])
                    path = results.write("language_generation", {**shape, "cases": found})
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()

"""Preparation of the corpus of installed packages: seconds by part, megabytes, documents, padding, memory, entropy of
held-out text without a model, and seconds per batch. A separate process prepares it in an empty cache. Limits: a
minute; 2% of positions are padding; a batch takes 1% of a step, and the shortest steps here take half a second.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks import results
from moe.data.sequences import PreparedSequences, SequenceSampler, prepare, unigram_nats_per_source, xz_bits_per_byte
from moe.spec import JobSpec, PackagesSpec

VOCAB_SIZE = 4096
LIMIT_S, LIMIT_WASTE, LIMIT_BATCH_S = 60.0, 0.02, 0.005
NUM_BATCHES, BATCH_TOKENS = 500, 8192


def a_job() -> JobSpec:
    model = {
        "kind": "language", "model_dim": 8, "num_layers": 1, "ffn_dim": 8, "vocab_size": VOCAB_SIZE,
        "attention": {"kind": "grouped_query", "num_heads": 1, "num_kv_heads": 1, "head_dim": 8},
    }  # fmt: skip
    train = {"num_steps": NUM_BATCHES, "batch_tokens": BATCH_TOKENS}
    return JobSpec.parse({"model": model, "data": {"corpus": "packages"}, "train": train})


def figures(folder: str) -> dict[str, Any]:
    """Figures of a process that prepares the corpus in an empty folder."""
    began, processor_start = time.perf_counter(), time.process_time()
    data = prepare(PackagesSpec(corpus="packages"), VOCAB_SIZE, folder)
    seconds, processor_s = time.perf_counter() - began, time.process_time() - processor_start
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    began = time.perf_counter()
    prepare(PackagesSpec(corpus="packages"), VOCAB_SIZE, folder)
    return {
        "seconds": round(seconds, 1),
        "processor_s": round(processor_s, 1),
        "limit_s": LIMIT_S,
        "parts_s": data.stats["seconds"],
        "found_again_s": round(time.perf_counter() - began, 2),
        "peak_bytes": peak_bytes,
        "limit_waste": LIMIT_WASTE,
        "batch_s": batch_s(data),
        "limit_batch_s": LIMIT_BATCH_S,
        "bytes_per_token": round(data.stats["train"]["bytes"] / data.stats["train"]["tokens"], 2),
        **{name: value for name, value in data.stats.items() if name != "seconds"},
        "held_out": held_out(data),
    }


def held_out(data: PreparedSequences) -> dict[str, Any]:
    """Size and entropy of each held-out source."""
    nats = unigram_nats_per_source(data.train, data.held_out, VOCAB_SIZE)
    return {
        name: {
            **data.stats["held_out"][name],
            "bytes_per_token": round(store.num_bytes / store.num_tokens, 2),
            "unigram_nats": round(nats[name] or 0.0, 3),
            "xz_bits_per_byte": round(xz_bits_per_byte(store.texts()) or 0.0, 3),
        }
        for name, store in data.held_out.items()
    }


def batch_s(data: PreparedSequences) -> float:
    """Mean seconds of a batch over many steps, including its arrays."""
    sampler = SequenceSampler(data.train, a_job())
    began = time.perf_counter()
    for step in range(NUM_BATCHES):
        sampler.batch(step).part(0, sampler.num_groups)
    return round((time.perf_counter() - began) / NUM_BATCHES, 6)


def show(corpus: dict[str, Any]) -> None:
    train = corpus["train"]
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in corpus["parts_s"].items())
    print(f"{train['bytes'] / 1e6:.1f} MB in {train['documents']:,} documents of {corpus['files']:,} files: "
          f"{train['tokens']:,} tokens of {corpus['bytes_per_token']} bytes; "
          f"left out: {corpus['left_out']}")  # fmt: skip
    print(f"prepared in {corpus['seconds']} s (limit {LIMIT_S:g}; processor {corpus['processor_s']}; {parts}), at most "
          f"{corpus['peak_bytes'] / 1e6:.0f} MB; found again in {corpus['found_again_s']} s")  # fmt: skip
    print(f"{100 * train['waste']:.2f}% of positions empty (limit {100 * LIMIT_WASTE:g}%); a batch of "
          f"{BATCH_TOKENS:,} takes {1e3 * corpus['batch_s']:.2f} ms")  # fmt: skip
    for name, part in corpus["held_out"].items():
        print(f"{name:>12}{part['documents']:>5} documents{part['bytes'] / 1e3:>8.0f} kB   unigram "
              f"{part['unigram_nats']:.2f} nats a token, xz {part['xz_bits_per_byte']:.2f} bits a byte")  # fmt: skip


def main() -> None:
    if sys.argv[1:]:
        print(json.dumps(figures(sys.argv[1])))
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.packages", folder]
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    corpus = json.loads(answer)
    show(corpus)
    print(f"written to {results.write('packages', corpus)}")


if __name__ == "__main__":
    main()

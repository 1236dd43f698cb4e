"""The loader of streamed documents beside that of prepared ones, on the source of installed packages, repeated: seconds
to the first batch, seconds to continue in the middle of a file, tokens per second, and peaks of memory and local disk.

Each loader runs in a process of its own, which takes batches as fast as they come, without a model. Limits: 30 s of
processor time until the first batch; local disk of at most two windows per partition; memory that does not grow with
the corpus.
"""

import gzip
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks import results
from moe.data.sequences import PreparedSequences, SequenceSampler, prepare
from moe.data.sequences.packages import Packages
from moe.data.sequences.stream.builder_process import BuilderProcess
from moe.data.sequences.stream.plan import StreamPlan
from moe.data.sequences.stream.sampler import StreamSampler
from moe.spec import JobSpec

VOCAB_SIZE, MAX_TOKENS, BATCH_TOKENS = 4096, 1024, 65_536
NUM_SHARDS, COPIES, FEW_COPIES = 16, 4, 1
NUM_BATCHES = 80
SHUFFLE_BYTES = 16 << 20
LIMIT_FIRST_BATCH_S = 30.0
"""Of processor time."""
LIMIT_DISK_BYTES = 2 * SHUFFLE_BYTES
"""Two windows per partition. A token of two bytes takes the place of about four bytes of text."""


def a_job(folder: str, *, is_stream: bool) -> JobSpec:
    model = {
        "kind": "language", "model_dim": 8, "num_layers": 1, "ffn_dim": 8, "vocab_size": VOCAB_SIZE,
        "attention": {"kind": "grouped_query", "num_heads": 1, "num_kv_heads": 1, "head_dim": 8},
    }  # fmt: skip
    data: dict[str, Any] = {"corpus": "documents", "sources": [{"paths": [f"{folder}/shards/*.jsonl.gz"]}]}
    data |= {"max_tokens": MAX_TOKENS, "stream": {"shuffle_bytes": SHUFFLE_BYTES} if is_stream else None}
    return JobSpec.parse({"model": model, "data": data, "train": {"num_steps": 1, "batch_tokens": BATCH_TOKENS}})


def write_shards(folder: Path, copies: int) -> dict[str, int]:
    """Write each document `copies` times, with a different first line; return sizes."""
    folder.mkdir()
    documents = [document.text for document in Packages().documents()]
    num_text = num_stored = 0
    for index in range(NUM_SHARDS):
        path = folder / f"{index:02}.jsonl.gz"
        with gzip.open(path, "wt", compresslevel=3, encoding="utf-8") as shard:
            for copy in range(copies):
                for text in documents[index::NUM_SHARDS]:
                    shard.write(json.dumps({"text": f"# {copy}\n{text}"}) + "\n")
                    num_text += len(text.encode())
        num_stored += path.stat().st_size
    return {"documents": copies * len(documents), "text_bytes": num_text, "stored_bytes": num_stored}


class Peaks:
    """Peaks of this process and its children, looked at every 50 ms: their memory, and the files below a folder that
    they have on disk or still mapped after they were removed."""

    def __init__(self, folder: Path) -> None:
        self.disk_bytes = self.memory_bytes = 0
        self._folder, self._end = folder, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        process = psutil.Process()
        while not self._end.wait(0.05):
            self.disk_bytes = max(self.disk_bytes, self._bytes_of_files())
            with suppress(psutil.Error):
                processes = (process, *process.children())
                self.memory_bytes = max(self.memory_bytes, sum(part.memory_full_info().uss for part in processes))

    def _bytes_of_files(self) -> int:
        sizes = dict[int, int]()
        for line in Path("/proc/self/maps").read_text().splitlines():
            places, _, _, _, inode, *path = line.split(maxsplit=5)
            if path and path[0].startswith(str(self._folder)):
                begin, end = (int(place, 16) for place in places.split("-"))
                sizes[int(inode)] = sizes.get(int(inode), 0) + end - begin
        with suppress(OSError):  # files come and go
            for path_on_disk in self._folder.rglob("*"):
                if path_on_disk.is_file():
                    status = path_on_disk.stat()
                    sizes[status.st_ino] = status.st_size
        return sum(sizes.values())

    def stop(self) -> None:
        self._end.set()
        self._thread.join()


def processor_s() -> float:
    """Seconds of processor time of this process and its children, also of those that still run."""
    own = time.process_time() + resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    return own + sum(sum(child.cpu_times()[:2]) for child in psutil.Process().children())


def stream_figures(folder: str) -> dict[str, Any]:
    """Figures of a process that streams."""
    began, processor_start, spec = time.perf_counter(), processor_s(), a_job(folder, is_stream=True)
    peaks = Peaks(Path(folder) / "streams")
    data = prepare(spec.data, VOCAB_SIZE, folder)
    prepared_s = time.perf_counter() - began
    sampler, plan = _sampler(spec, data)
    tokens = int(sampler.batch(0).tokens_by_source.sum())
    first_batch_s, first_batch_processor_s = time.perf_counter() - began, processor_s() - processor_start
    began, processor_start = time.perf_counter(), processor_s()
    for step in range(1, NUM_BATCHES):
        tokens += int(sampler.batch(step).tokens_by_source.sum())
    seconds, processor = time.perf_counter() - began, processor_s() - processor_start
    positions = sampler.positions(NUM_BATCHES)
    sampler.close()
    began, processor_start = time.perf_counter(), processor_s()
    sampler, _ = _sampler(spec, data)
    sampler.seek(NUM_BATCHES, json.loads(json.dumps(positions), object_hook=_with_numbers))
    sampler.batch(NUM_BATCHES)
    continued_s, continued_processor_s = time.perf_counter() - began, processor_s() - processor_start
    sampler.close()
    peaks.stop()
    return {
        "prepared_s": round(prepared_s, 2),
        "first_batch_s": round(first_batch_s, 2),
        "first_batch_processor_s": round(first_batch_processor_s, 2),
        "tokens": tokens,
        "tokens_per_s": round(tokens / seconds),
        "tokens_per_processor_s": round(tokens / processor),
        "padding": round(1 - tokens / (NUM_BATCHES * BATCH_TOKENS), 5),
        "continued_s": round(continued_s, 2),
        "continued_processor_s": round(continued_processor_s, 2),
        "peak_disk_bytes": peaks.disk_bytes,
        "peak_memory_bytes": peaks.memory_bytes,
        "window_bytes": plan.window_bytes,
        "partitions": plan.num_partitions,
    }


def _sampler(spec: JobSpec, data: PreparedSequences) -> tuple[StreamSampler, StreamPlan]:
    assert data.shards is not None
    plan = StreamPlan.of_job(spec, data.shards)
    builder = BuilderProcess(plan, data.folder, None, 2)
    return StreamSampler(plan, range(plan.num_groups), data.folder.parent / "streams", builder), plan


def _with_numbers(plain: dict[str, Any]) -> dict[Any, Any]:
    return {int(key) if key.isdecimal() else key: value for key, value in plain.items()}


def prepared_figures(folder: str) -> dict[str, Any]:
    """Figures of a process that prepares the same files, and then takes as many batches."""
    began, processor_start, spec = time.perf_counter(), processor_s(), a_job(folder, is_stream=False)
    peaks = Peaks(Path(folder) / "prepared")
    data = prepare(spec.data, VOCAB_SIZE, Path(folder) / "prepared")
    sampler = SequenceSampler(data.train, spec)
    sampler.batch(0).part(0, sampler.num_groups)
    first_batch_s, processor = time.perf_counter() - began, processor_s() - processor_start
    began, tokens = time.perf_counter(), 0
    for step in range(NUM_BATCHES):
        batch = sampler.batch(step)
        batch.part(0, sampler.num_groups)
        tokens += batch.num_tokens
    seconds = time.perf_counter() - began
    peaks.stop()
    return {
        "first_batch_s": round(first_batch_s, 2),
        "first_batch_processor_s": round(processor, 2),
        "corpus_tokens": data.stats["train"]["tokens"],
        "corpus_tokens_per_processor_s": round(data.stats["train"]["tokens"] / processor),
        "tokens_per_s": round(tokens / seconds),
        "padding": data.stats["train"]["waste"],
        "peak_disk_bytes": sum(path.stat().st_size for path in data.folder.rglob("*") if path.is_file()),
        "peak_memory_bytes": peaks.memory_bytes,
    }


def _in_process(kind: str, folder: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.streaming", kind, folder]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    figures: dict[str, Any] = json.loads(answer.splitlines()[-1])
    return figures


def main() -> None:
    if sys.argv[1:]:
        kind, folder = sys.argv[1:]
        print(json.dumps((stream_figures if kind == "stream" else prepared_figures)(folder)))
        return
    figures: dict[str, Any] = {"limit_first_batch_s": LIMIT_FIRST_BATCH_S, "limit_disk_bytes": LIMIT_DISK_BYTES}
    for name, copies in (("few", FEW_COPIES), ("many", COPIES)):
        with tempfile.TemporaryDirectory() as folder:
            figures[f"corpus_{name}"] = write_shards(Path(folder) / "shards", copies)
            figures[f"stream_{name}"] = _in_process("stream", folder)
            if copies == COPIES:
                figures["prepared"] = _in_process("prepared", folder)
    for name in ("stream_few", "stream_many", "prepared"):
        row = figures[name]
        disk_mb, memory_mb = row["peak_disk_bytes"] / 1e6, row["peak_memory_bytes"] / 1e6
        print(f"{name:>12}: first batch after {row['first_batch_s']:.1f} s, {row['tokens_per_s']:,} tokens/s, "
              f"disk {disk_mb:,.1f} MB, memory {memory_mb:,.0f} MB")  # fmt: skip
    row, prepared = figures["stream_many"], figures["prepared"]
    print(f"streams {row['tokens_per_processor_s']:,} tokens per second of processor time, preparing "
          f"{prepared['corpus_tokens_per_processor_s']:,}; {100 * row['padding']:.2f}% padding; processor time until "
          f"the first batch {row['first_batch_processor_s']:.1f} s (limit {LIMIT_FIRST_BATCH_S:g}; prepared: "
          f"{prepared['first_batch_processor_s']:.1f} s), to continue in the middle of a file "
          f"{row['continued_processor_s']:.1f} s")  # fmt: skip
    print(f"written to {results.write('streaming', figures)}")


if __name__ == "__main__":
    main()

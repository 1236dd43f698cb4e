"""One small decoder twice: transformers' model, and ours with its weights, each in its own process, timed in turns.

A side is a function that prepares its process and returns the function of a round. Both processes have the memory
settings and threads of training. Rounds are timed by the clock and in processor seconds; the peak of anonymous memory
is sampled every few milliseconds.
"""

import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from moe.spec import LanguageModelSpec

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "num_experts": 32, "num_experts_per_tok": 4,
    "moe_intermediate_size": 256, "vocab_size": 4096, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "max_position_embeddings": 2048, "tie_word_embeddings": False,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
"""A small Qwen3-MoE, as transformers names its sizes."""


@dataclass(frozen=True)
class Case:
    """Case that one side runs: weights, dtype, threads and settings."""

    folder: str
    """Folder of the weights, in the original format."""
    dtype: str
    num_threads: int
    settings: tuple[int, ...] = ()


@dataclass(frozen=True)
class RoundResult:
    """Result of one round."""

    seconds: float
    processor_s: float
    answer: Any
    """Return value of the round."""


Round = Callable[[], Any]
Ready = Callable[[Case], Round]


def save_weights(folder: Path) -> None:
    """Save random weights, as transformers draws them for this config."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**CONFIG))
    model.save_pretrained(folder, save_original_format=True)


def their_model(folder: str) -> "nn.Module":
    """transformers' model in float32, with grouped products of all experts."""
    import torch
    import transformers

    model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="grouped_mm"
    )
    return model


def our_spec(folder: str) -> "LanguageModelSpec":
    """Spec of the same model without an auxiliary loss: transformers adds none by default."""
    from moe.interchange.expand import expand_model
    from moe.spec import LanguageModelSpec, model_spec

    spec = model_spec(expand_model({"from": folder, "moe": {"aux_coefficient": 0.0}}, None))
    assert isinstance(spec, LanguageModelSpec)
    return spec


class Side:
    """A process with one of the models."""

    def __init__(self, ready: Ready, case: Case) -> None:
        from moe.train.environment import children_keep_freed_memory

        context = multiprocessing.get_context("spawn")
        self._pipe, child_pipe = context.Pipe()
        self._process = context.Process(target=_serve, args=(ready, case, child_pipe), daemon=True)
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = str(case.num_threads)
        try:
            with children_keep_freed_memory():
                self._process.start()
        finally:
            if before is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = before
        child_pipe.close()
        self._pipe.recv()

    def round(self) -> RoundResult:
        self._pipe.send(True)
        result: RoundResult = self._pipe.recv()
        return result

    def end(self) -> int:
        """Peak of anonymous memory of the process in bytes."""
        self._pipe.send(False)
        peak: int = self._pipe.recv()
        self._process.join()
        return peak


@contextmanager
def _watch_peak() -> Iterator[Callable[[], int]]:
    """Peak of anonymous memory of this process so far, sampled every few milliseconds."""
    stop, peak = threading.Event(), 0

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.005):
            peak = max(peak, anonymous_bytes())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield lambda: max(peak, anonymous_bytes())
    stop.set()
    thread.join()


def anonymous_bytes() -> int:
    """Anonymous memory of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/self/status has no RssAnon: memory is measured on Linux alone")


def _serve(ready: Ready, case: Case, pipe: Connection) -> None:
    import torch

    torch.set_num_threads(case.num_threads)
    run = ready(case)
    with _watch_peak() as peak:
        pipe.send(None)
        while pipe.recv():
            began, processor_start = time.perf_counter(), time.process_time()
            answer = run()
            pipe.send(RoundResult(time.perf_counter() - began, time.process_time() - processor_start, answer))
        pipe.send(peak())


def in_turns(sides: dict[str, Side], num_rounds: int) -> dict[str, list[RoundResult]]:
    """Results of the rounds by side; the order of sides alternates, and one round before is not counted."""
    rounds: dict[str, list[RoundResult]] = {name: [] for name in sides}
    for number in range(num_rounds + 1):
        for name in list(sides) if number % 2 else list(sides)[::-1]:
            answer = sides[name].round()
            if number:
                rounds[name].append(answer)
    return rounds


def ratio(transformers_s: list[float], shardyard_s: list[float]) -> float:
    """Median of the ratios of pairs."""
    return statistics.median(a / b for a, b in zip(transformers_s, shardyard_s, strict=True))

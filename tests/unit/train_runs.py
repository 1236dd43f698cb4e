"""Small runs that the tests of moe.train share: a corpus, a job on it, and the run itself in this process."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from moe.data.pairs import PreparedPairs
from moe.parallel import Layout
from moe.plan import Cluster, plan_job
from moe.spec import JobSpec
from moe.storage.folder import Folder
from moe.tasks.build import build_task
from moe.train.checkpoint import marker as markers
from moe.train.checkpoint.run_files import stored_tokenizers
from moe.train.control import Control, NoControl, Request
from moe.train.loop import Outcome, train
from moe.train.recorder import MemoryRecorder
from tests.unit.data_corpora import sentences, write_jsonl


def corpus(folder: Path) -> dict[str, Any]:
    """The data part of a job: 600 pairs in four languages, three scripts."""
    path = write_jsonl(folder / "corpus.jsonl", sentences(150))
    return {"corpus": "jsonl", "paths": [path], "max_tokens": 32, "held_out_messages": 0.05}


def job(data: dict[str, Any], *, workers: int = 1, expert: int | None = None, **parts: Any) -> JobSpec:
    """A job of a few steps on a model of four experts a layer; `parts` overrides top-level parts."""
    train_part = {
        "num_steps": 8, "batch_tokens": 256, "optimizer": {"name": "adamw", "peak_lr": 1e-2},
        "evaluation": {"max_pairs": 6, "num_examples": 3}, **parts.pop("train", {}),
    }  # fmt: skip
    model = {
        "model_dim": 16, "num_heads": 2, "head_dim": 8, "ffn_dim": 32, "num_encoder_layers": 2,
        "num_decoder_layers": 2, "source_vocab_size": 400, "target_vocab_size": 400,
        "moe": {"num_experts": 4, "hidden_dim": 24, "group_tokens": 64}, **parts.pop("model", {}),
    }  # fmt: skip
    return JobSpec.parse({
        "name": "x", "model": model, "data": data, "train": train_part,
        "resources": {"num_workers": workers}, "parallel": {} if expert is None else {"expert": expert},
        "checkpoint": {"every_steps": 2, "keep": 2}, **parts,
    })  # fmt: skip


class RequestAfter(Control):
    """Control that makes its request from poll number `num_steps` on."""

    def __init__(self, request: Request, num_steps: int) -> None:
        self._request, self._left = request, num_steps

    def poll(self) -> Request | None:
        self._left -= 1
        return self._request if self._left <= 0 else None


class PreemptedAfter(Control):
    """Control of a rank whose node is told to end before step `num_steps`."""

    def __init__(self, num_steps: int) -> None:
        self._left = num_steps

    def poll(self) -> Request | None:
        return None

    def is_preempted(self) -> bool:
        self._left -= 1
        return self._left <= 0


def run(
    spec: JobSpec,
    storage: Path | str,
    cache: Path,
    *,
    attempt: int = 1,
    group: int = 0,
    control: Control | None = None,
    micro_batch_groups: int | None = None,
    device: str = "cpu",
    recorder: MemoryRecorder | None = None,
    pause_at: int | None = None,
) -> tuple[Outcome, MemoryRecorder]:
    """Train in this process, or on all ranks if there is a process group; all of them call it.

    `micro_batch_groups`, if given, replaces the planner's choice.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    plan = plan_job(
        spec, Cluster(num_nodes=1, devices_per_node=world_size, device="cpu", memory_bytes=4 << 30), world_size
    )
    if micro_batch_groups is not None:
        groups_per_rank = -(-spec.num_groups // world_size)
        num_micro_batches = -(-groups_per_rank // micro_batch_groups)
        micro_batches = {"micro_batch_groups": micro_batch_groups, "num_micro_batches": num_micro_batches}
        plan = plan.model_copy(update={"options": replace(plan.options, **micro_batches)})
    recorder, layout = recorder or MemoryRecorder(), Layout.build(plan, device)
    data = build_task(spec).prepare(cache, read_checkpoint_files=lambda: stored_tokenizers(str(storage)))
    outcome = train(
        build_task(spec), plan, layout, data=data, storage=str(storage), cache=Path(cache),
        attempt=attempt, group=group, recorder=recorder, control=control or NoControl(),
        pause_at=pause_at,
    )  # fmt: skip
    layout.close()
    return outcome, recorder


def prepare_pairs(spec: JobSpec, cache: Path) -> PreparedPairs:
    return build_task(spec).prepare(cache)


def rewrite(storage: Path | str, path: str, change: Callable[[bytes], bytes]) -> None:
    """Replace a file of the newest checkpoint, as if it had been committed so."""
    checkpoints = Folder(f"{storage}/checkpoints")
    marker = markers.read(checkpoints, markers.list_committed(checkpoints)[0])
    content = change(checkpoints.read(f"{marker.name}/{path}"))
    checkpoints.write(f"{marker.name}/{path}", content)
    new_marker = marker.model_copy(update={"files": {**marker.files, path: markers.seal(content)}})
    checkpoints.write(marker.name + markers.SUFFIX, new_marker.to_bytes())


def course(recorder: MemoryRecorder) -> list[dict[str, Any]]:
    """Metrics of the steps, without times and exchanged bytes."""
    varying_keys = {"step_s", "tokens_per_s", "data_s", "time", "all_to_all_bytes", "all_to_all_s", "waiting_s"}

    def without(values: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in values.items() if key not in varying_keys}

    return [
        {**without(values), "layers": [without(layer) for layer in values["layers"]]}
        for values in (record.to_plain() for record in recorder.metrics)
    ]

"""Metadata files of a checkpoint: spec, plan, run state and tokenizers."""

import json
import posixpath
from collections.abc import Collection, Mapping
from typing import Any

from moe.plan import Plan
from moe.spec import JobSpec, Problem, SpecError
from moe.storage.folder import Folder
from moe.tasks.task import PreparedData
from moe.train.best_score import BestScore
from moe.train.checkpoint import marker as markers
from moe.train.checkpoint.spec_changes import SPEC, spec_of, state_changes, trajectory_changes

PLAN, RUN, TOKENIZERS = "plan.json", "run.json", "tokenizers"

_MAX_RUN_BYTES = 1 << 22
_AS_BEFORE = "restore the previous files and package versions, or use another storage to train from scratch"


def run_files(spec: JobSpec, plan: Plan, data: PreparedData) -> dict[str, bytes]:
    """Spec, plan and tokenizer files by path in a checkpoint's folder."""
    return {
        SPEC: spec.model_dump_json(indent=1).encode(),
        PLAN: plan.model_dump_json(indent=1).encode(),
        **_below_tokenizers(data.tokenizer_files()),
        **_below_tokenizers(data.carried_files()),
    }


def _below_tokenizers(files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {f"{TOKENIZERS}/{name}": content for name, content in sorted(files.items())}


def stored_tokenizers(storage: str) -> dict[str, bytes]:
    """Tokenizer files of a run's newest own checkpoint, by name; empty before the first. Raises OSError."""
    checkpoints = Folder.of_job(storage).subfolder(markers.FOLDER)
    newest = next((name for name in markers.list_committed(checkpoints) if not markers.is_copy(name)), None)
    if newest is None:
        return {}
    return files_of(checkpoints.subfolder(newest))


def files_of(checkpoint: Folder) -> dict[str, bytes]:
    """Tokenizer files of a checkpoint, by name."""
    folder = checkpoint.subfolder(TOKENIZERS)
    return {name: folder.read(name) for name in folder.names("")}


def run_state(
    spec: JobSpec,
    data: PreparedData,
    step: int,
    trained_s: float = 0.0,
    best: BestScore | None = None,
    stream: Any = None,
) -> bytes:
    """Content of `run.json`: position in data and random streams after `step` steps.

    Batches, random draws and learning rate are functions of (seed, step), so there is no generator state. `prepared`
    is the key of the prepared data; `trained_s`, the seconds of all steps, is stored only under `train.max_duration`,
    and `best` only if evaluations are compared. `stream` is the position of streamed data.
    """
    state: dict[str, Any] = {
        "step": step,
        "data": {"seed": spec.train.seed, "next_batch": step, "prepared": data.key},
        "random": {"seed": spec.train.seed, "next_step": step},
    }
    if stream is not None:
        state["data"]["stream"] = stream
    if spec.train.max_duration is not None:
        state["trained_s"] = trained_s
    if best is not None and spec.train.evaluation.every_steps is not None:
        state["best"] = best.to_plain()
    return json.dumps(state, indent=1).encode()


def read_run_state(checkpoint: Folder) -> dict[str, Any]:
    """Content of a checkpoint's `run.json`. Raises OSError; ValueError if it is damaged."""
    try:
        state = json.loads(checkpoint.read(RUN, max_bytes=_MAX_RUN_BYTES))
    except RecursionError as error:
        raise ValueError(f"{checkpoint.url_of(RUN)} is nested too deeply") from error
    if not isinstance(state, dict):
        raise ValueError(f"{checkpoint.url_of(RUN)} does not hold an object")
    return state


def best_committed(checkpoints: Folder, excluded: Collection[str] = ()) -> str | None:
    """Name of a run's best committed checkpoint: that of the best evaluation, by the newest checkpoint's `run.json`.

    None without an evaluation, or if its step has no checkpoint. Skips `excluded` names, and checkpoints with a damaged
    `run.json`. Raises OSError.
    """
    names = [name for name in markers.list_committed(checkpoints) if not markers.is_copy(name)]
    names = [name for name in names if name not in excluded]
    for newest in names:
        try:
            state = read_run_state(checkpoints.subfolder(newest))
        except (ValueError, FileNotFoundError):
            continue
        match state:
            case {"best": {"step": int(step)}}:
                return next((name for name in names if (markers.order(name) or ())[:1] == (step,)), None)
        return None
    return None


def run_changes(spec: JobSpec, data: PreparedData, checkpoint: Folder) -> list[Problem]:
    """Problems that prevent resuming from a checkpoint, one per field.

    Checkpoints copied from another job are checked by `state_changes`, the run's own by `other_course`. Fields that the
    checkpoint's release did not have take this release's defaults.
    """
    try:
        before = spec_of(checkpoint)
    except SpecError as error:
        return list(error.problems)
    name = posixpath.basename(checkpoint.url)
    problems = state_changes(before, spec) if markers.is_copy(name) else trajectory_changes(before, spec)
    return problems or _data_changes(data, checkpoint)


def _data_changes(data: PreparedData, checkpoint: Folder) -> list[Problem]:
    """Problems of data that changed under the same spec: a rewritten file, an upgraded package."""
    key, recorded_key = data.key, json.loads(checkpoint.read(RUN))["data"].get("prepared")
    if recorded_key not in (key, None):  # absent in the earliest checkpoints
        rule = f"has changed: it is prepared as {key}, but the checkpoint in this storage was trained on {recorded_key}"
        return [Problem("changed", "data", None, rule, _AS_BEFORE)]
    return [
        Problem(
            "changed", "data", None, f"tokenizes differently from the {path} in this storage's checkpoint", _AS_BEFORE
        )
        for path, content in _below_tokenizers(data.tokenizer_files()).items()
        if checkpoint.read(path) != content
    ]

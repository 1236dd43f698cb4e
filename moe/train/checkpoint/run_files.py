"""The small files of a checkpoint that say what was trained, on what, and how far."""

import json
import posixpath
from collections.abc import Mapping
from typing import Any

from moe.plan import Plan
from moe.spec import JobSpec, Problem, SpecError
from moe.storage.folder import Folder
from moe.tasks.task import PreparedData
from moe.train.checkpoint import marker as markers
from moe.train.checkpoint.course import SPEC, other_course, other_state, spec_of

PLAN, RUN, TOKENIZERS = "plan.json", "run.json", "tokenizers"

_AS_BEFORE = "bring back the files and package versions of before, or use another storage to train anew"


def run_files(spec: JobSpec, plan: Plan, data: PreparedData) -> dict[str, bytes]:
    """Files of a checkpoint beside its tensors, by path: the spec, the plan, and the tokenizers of its data."""
    return {
        SPEC: spec.model_dump_json(indent=1).encode(),
        PLAN: plan.model_dump_json(indent=1).encode(),
        **_below_tokenizers(data.tokenizer_files()),
        **_below_tokenizers(data.carried_files()),
    }


def _below_tokenizers(files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {f"{TOKENIZERS}/{name}": content for name, content in sorted(files.items())}


def kept_tokenizers(storage: str) -> dict[str, bytes]:
    """Files that the newest committed checkpoint of a run carries with its tokenizers, by name; none before the first.

    One that was copied from another job is not the run's own. Raises OSError.
    """
    checkpoints = Folder.of_job(storage).below(markers.FOLDER)
    own = next((name for name in markers.list_committed(checkpoints) if not markers.is_copy(name)), None)
    if own is None:
        return {}
    return files_of(checkpoints.below(own))


def files_of(checkpoint: Folder) -> dict[str, bytes]:
    """Files that a checkpoint carries with its tokenizers, by name."""
    folder = checkpoint.below(TOKENIZERS)
    return {name: folder.read(name) for name in folder.names("")}


def run_state(spec: JobSpec, data: PreparedData, step: int, trained_s: float = 0.0) -> bytes:
    """`run.json`: where in the data and in its random choices a run stands after `step` steps.

    Batches, random choices and the learning rate are functions of (seed, step), so these two are all of it:
    no generator has a state that would have to be kept. `prepared` is the key of the data that the batches are taken
    from. `trained_s`, the seconds of all steps, is kept where `train.max_duration` counts them.
    """
    state: dict[str, Any] = {
        "step": step,
        "data": {"seed": spec.train.seed, "next_batch": step, "prepared": data.key},
        "random": {"seed": spec.train.seed, "next_step": step},
    }
    if spec.train.max_duration is not None:
        state["trained_s"] = trained_s
    return json.dumps(state, indent=1).encode()


def trained_s_of(checkpoint: Folder) -> float:
    """Seconds of training that a checkpoint's run had behind it; 0 where that was not counted."""
    seconds = json.loads(checkpoint.read(RUN)).get("trained_s", 0.0)
    return float(seconds) if isinstance(seconds, int | float) else 0.0


def other_run(spec: JobSpec, data: PreparedData, checkpoint: Folder) -> list[Problem]:
    """Differences that keep a run from going on from a checkpoint, naming every field; empty where it may.

    One that was copied from another job need only be of the same kind; a run's own must be of its course. A field
    that the checkpoint's release did not have yet counts as this release's default.
    """
    try:
        before = spec_of(checkpoint)
    except SpecError as error:
        return list(error.problems)
    name = posixpath.basename(checkpoint.url)
    problems = other_state(before, spec) if markers.is_copy(name) else other_course(before, spec)
    return problems or _other_data(data, checkpoint)


def _other_data(data: PreparedData, checkpoint: Folder) -> list[Problem]:
    """Problems of data that differ from the checkpoint's: files and packages may have changed under the same spec."""
    key, key_then = data.key, json.loads(checkpoint.read(RUN))["data"].get("prepared")
    if key_then not in (key, None):  # the first checkpoints did not say
        rule = f"is prepared as {key}, but the checkpoint in this storage was trained on {key_then}: it has changed"
        return [Problem("changed", "data", None, rule, _AS_BEFORE)]
    return [
        Problem(
            "changed",
            "data",
            None,
            f"gives other tokens than the {path} in this storage's checkpoint",
            _AS_BEFORE,
        )
        for path, content in _below_tokenizers(data.tokenizer_files()).items()
        if checkpoint.read(path) != content
    ]

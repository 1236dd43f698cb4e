"""The small files of a checkpoint that say what was trained, on what, and how far."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moe.data import Prepared, Tokenizers
from moe.plan import Plan
from moe.spec import JobSpec, Problem, SpecError
from moe.train.folder import Folder

SPEC, PLAN, RUN, TOKENIZERS = "spec.json", "plan.json", "run.json", "tokenizers"

_COURSE = (
    "model", "data", "train.batch_tokens", "train.seed", "train.optimizer", "train.schedule",
    "train.label_smoothing", "train.clip_norm", "train.dtype",
)  # fmt: skip
"""What decides the course that a run takes; of `train` that is all but `num_steps` and `evaluation`."""
_OTHER_RUN = "use another storage for another run"
_AS_BEFORE = "bring back the files and package versions of before, or use another storage to train anew"


def run_files(spec: JobSpec, plan: Plan, tokenizers: Tokenizers) -> dict[str, bytes]:
    """By path in a checkpoint's folder: the spec, the plan, and the tokenizers that its tokens come from."""
    return {
        SPEC: spec.model_dump_json(indent=1).encode(),
        PLAN: plan.model_dump_json(indent=1).encode(),
        **_tokenizer_files(tokenizers),
    }


def _tokenizer_files(tokenizers: Tokenizers) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as scratch:
        tokenizers.save(scratch)
        return {
            f"{TOKENIZERS}/{path.relative_to(scratch).as_posix()}": path.read_bytes()
            for path in sorted(Path(scratch).rglob("*"))
            if path.is_file()
        }


def run_state(spec: JobSpec, prepared: Prepared, step: int) -> bytes:
    """`run.json`: where in the data and in its random choices a run stands after `step` steps.

    Batches, random choices and the learning rate are functions of (seed, step), so these two are all of it:
    no generator has a state that would have to be kept. `prepared` is the content key of the data that the
    batches are taken from.
    """
    state: dict[str, Any] = {
        "step": step,
        "data": {"seed": spec.train.seed, "next_batch": step, "prepared": _content_key(prepared)},
        "random": {"seed": spec.train.seed, "next_step": step},
    }
    return json.dumps(state, indent=1).encode()


def _content_key(prepared: Prepared) -> str:
    """What `prepare` names a prepared corpus by: a hash of all that decides its content."""
    return prepared.folder.name


def other_run(spec: JobSpec, prepared: Prepared, checkpoint: Folder) -> list[Problem]:
    """What makes a checkpoint that of another run, naming every field; empty where the run may go on from it.

    What may change between attempts: how long (`train.num_steps`, over which the schedule is stretched), how
    it is evaluated, where and on how many workers it goes, and what it is called. Everything that changes the
    steps in between is refused rather than taken, so that a run is one course, whatever interrupts it. A field
    that the checkpoint's release did not have yet counts as this release's default.
    """
    try:
        before = JobSpec.parse(json.loads(checkpoint.read(SPEC)))
    except SpecError as error:
        return [Problem("storage", checkpoint.url, f"must hold a spec that this release reads, but {error}",
                        "resume with the release that began the run, or use another storage")]  # fmt: skip
    problems = [
        Problem(path, now, f"must be what the checkpoint in this storage was trained with (={_shown(then)})",
                _OTHER_RUN)
        for field in _COURSE
        for path, then, now in _differences(field, _at(before, field), _at(spec, field))
    ]  # fmt: skip
    return problems or _other_data(prepared, checkpoint)


def _other_data(prepared: Prepared, checkpoint: Folder) -> list[Problem]:
    """The same spec may name data that has changed: a file rewritten, a package with catalogs upgraded."""
    key, key_then = _content_key(prepared), json.loads(checkpoint.read(RUN))["data"].get("prepared")
    if key_then not in (key, None):  # the first checkpoints did not say
        rule = f"is prepared as {key}, but the checkpoint in this storage was trained on {key_then}: it has changed"
        return [Problem("data", None, rule, _AS_BEFORE)]
    return [
        Problem("data", None, f"gives other tokens than the {path} in this storage's checkpoint", _AS_BEFORE)
        for path, content in _tokenizer_files(prepared.tokenizers).items()
        if checkpoint.read(path) != content
    ]


def _at(spec: JobSpec, field: str) -> Any:
    values: Any = spec.model_dump(mode="json")
    for key in field.split("."):
        values = values[key]
    return values


def _differences(path: str, then: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """(path, value then, value now) of everything below `path` that differs, at the deepest place."""
    if not (isinstance(then, dict) and isinstance(now, dict)):
        if then != now:
            yield path, then, now
        return
    for key in {**then, **now}:
        yield from _differences(f"{path}.{key}", then.get(key), now.get(key))


def _shown(value: Any) -> str:
    shown = json.dumps(value)
    return shown if len(shown) <= 120 else shown[:117] + "..."

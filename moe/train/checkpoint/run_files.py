"""The small files of a checkpoint that say what was trained, on what, and how far."""

import json
import posixpath
import tempfile
from pathlib import Path
from typing import Any

from moe.data.pairs import Prepared, Tokenizers
from moe.plan import Plan
from moe.spec import JobSpec, Problem, SpecError
from moe.storage.folder import Folder
from moe.train.checkpoint import marker as markers
from moe.train.checkpoint.course import SPEC, other_course, other_state, spec_of

PLAN, RUN, TOKENIZERS = "plan.json", "run.json", "tokenizers"

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
    """What keeps a run from going on from a checkpoint, naming every field; empty where it may.

    One that was copied from another job need only be of the same kind; a run's own must be of its course. A field
    that the checkpoint's release did not have yet counts as this release's default.
    """
    try:
        before = spec_of(checkpoint)
    except SpecError as error:
        return list(error.problems)
    name = posixpath.basename(checkpoint.url)
    problems = other_state(before, spec) if markers.is_copy(name) else other_course(before, spec)
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

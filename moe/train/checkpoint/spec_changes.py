"""Spec fields that must match for a run to resume from a checkpoint, its own or another job's. No torch."""

import json
from collections.abc import Iterator
from typing import Any

from moe.spec import JobSpec, Problem, spec_error
from moe.spec.data import SAMPLING_FIELDS
from moe.spec.patterns import layer_pattern, matches
from moe.storage.folder import Folder

SPEC = "spec.json"
"""File in a checkpoint's folder with the job spec of its run."""
MAX_SPEC_BYTES = 1 << 24
"""Size limit of that file: many times what the service accepts."""
_COURSE = (
    "model", "data", "train.batch_tokens", "train.seed", "train.optimizer", "train.schedule",
    "train.label_smoothing", "train.preference_loss", "train.preference_beta", "train.preference_margin",
    "train.desirable_weight", "train.undesirable_weight", "train.clip_norm", "train.dtype", "train.freeze",
    "train.ema_decay",
)  # fmt: skip
"""Fields that determine the course of a run: in `train`, all but `num_steps` and `evaluation`."""
_STATE = ("model", "data", "train.optimizer.name", "train.dtype")
"""Fields that give a checkpoint's tensors their meaning: model, embedded tokens, optimizer state."""
_LAYOUT = "model.hints"
"""Placement hints of a user module, which a new job may change."""
_FREE = frozenset(f"data.{name}" for name in (*SAMPLING_FIELDS, "date"))


def spec_of(checkpoint: Folder) -> JobSpec:
    """Spec of the run that wrote a checkpoint. Raises SpecError if this release cannot read it."""
    try:
        return JobSpec.parse(json.loads(checkpoint.read(SPEC, max_bytes=MAX_SPEC_BYTES)), accepted=True)
    except (ValueError, RecursionError) as error:
        raise spec_error("wrong_version", "storage", checkpoint.url,
                         f"must hold a spec that this release can read, but {error}",
                         "resume with the release that started the run, or use another storage") from None  # fmt: skip


def trajectory_changes(previous: JobSpec, current: JobSpec) -> list[Problem]:
    """Problems that prevent resuming with a changed spec, one per field.

    Attempts may differ in length (`train.num_steps`, over which the schedule is stretched), evaluation, placement,
    workers and name, but in nothing that changes the steps in between.
    """
    rule = "must match the checkpoint in this storage"
    return [
        Problem(
            "conflict", path, value, f"{rule} (={_format_value(previous_value)})", "use another storage for another run"
        )
        for path, previous_value, value in _all_differences(_COURSE, previous, current)
    ]


def state_changes(previous: JobSpec, current: JobSpec) -> list[Problem]:
    """Problems that prevent starting from another job's checkpoint, one per field.

    The new job may have other steps, batches, learning rates, schedule, seed, layout and workers, and freeze more
    parameters, but not train parameters without optimizer state.
    """
    rule = "must match the checkpoint that this job starts from"
    differences = [
        Problem(
            "conflict",
            path,
            value,
            f"{rule} (={_format_value(previous_value)})",
            "keep it, or omit start_from to train from scratch",
        )
        for path, previous_value, value in _all_differences(_STATE, previous, current)
        if path not in _FREE and not path.startswith(_LAYOUT)
    ]
    return [
        *differences, *_other_reference(previous, current), *_without_moments(previous, current),
        *_without_average(previous, current), *_other_moments(previous, current),
    ]  # fmt: skip


def _other_reference(previous: JobSpec, current: JobSpec) -> Iterator[Problem]:
    """Problem of a reference model whose initial weights are drawn by another seed."""
    model, seed = current.model, current.train.seed
    is_drawn = getattr(model, "from_folder", None) is None or getattr(model, "upcycle", None) is not None
    if current.has_frozen_reference and is_drawn and seed != previous.train.seed:
        yield Problem("conflict", "train.seed", seed,
                      f"must match the checkpoint that this job starts from (={previous.train.seed}), since the "
                      "reference model's initial weights are drawn by it", "omit it")  # fmt: skip


def _other_moments(previous: JobSpec, current: JobSpec) -> Iterator[Problem]:
    """Problem of 8-bit moments, whose codes and scales have no other form."""
    dtypes = [getattr(spec.train.optimizer, "moments", None) for spec in (previous, current)]
    if dtypes[0] != dtypes[1] and "8bit" in dtypes:
        yield Problem("conflict", "train.optimizer.moments", dtypes[1],
                      f"must match the checkpoint that this job starts from (={_format_value(dtypes[0])})",
                      "keep it, or export that model and start from its weights: model.from")  # fmt: skip


def _without_average(previous: JobSpec, current: JobSpec) -> Iterator[Problem]:
    if current.train.ema_decay is not None and previous.train.ema_decay is None:
        yield Problem("conflict", "train.ema_decay", current.train.ema_decay,
                      "must be omitted, since the checkpoint that this job starts from has no average of the weights",
                      "omit it, or export that model and start from its weights: model.from")  # fmt: skip


def _without_moments(previous: JobSpec, current: JobSpec) -> Iterator[Problem]:
    """Problem of parameters that were frozen and are now to be trained."""
    if not previous.train.freeze:
        return

    def is_frozen(name: str, spec: JobSpec) -> bool:
        return any(matches(pattern, name) for pattern in spec.train.freeze)

    names = [parameter.name for parameter in current.model.parameters() if not parameter.frozen]
    thawed_kinds = dict.fromkeys(
        layer_pattern(name) for name in names if is_frozen(name, previous) and not is_frozen(name, current)
    )
    if thawed_kinds:
        yield Problem("conflict", "train.freeze", list(current.train.freeze),
                      "must include what was frozen in the checkpoint that this job starts from "
f"({', '.join(thawed_kinds)}), which has no optimizer state",
                      "freeze it too, or export that model and start from its weights: model.from")  # fmt: skip


def _all_differences(fields: tuple[str, ...], previous: JobSpec, current: JobSpec) -> Iterator[tuple[str, Any, Any]]:
    previous_values, current_values = (
        previous.resolved.model_dump(mode="json"),
        current.resolved.model_dump(mode="json"),
    )
    for field in fields:
        yield from _differences(field, _field_value(previous_values, field), _field_value(current_values, field))


def _field_value(values: Any, field: str) -> Any:
    for key in field.split("."):
        values = values[key]
    return values


def _differences(path: str, previous: Any, current: Any) -> Iterator[tuple[str, Any, Any]]:
    """(path, value then, value now) of each difference below `path`, at leaf level."""
    if not (isinstance(previous, dict) and isinstance(current, dict)):
        if previous != current:
            yield path, previous, current
        return
    for key in {**previous, **current}:
        yield from _differences(f"{path}.{key}", previous.get(key), current.get(key))


def _format_value(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."

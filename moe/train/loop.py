"""Training loop: resume from the newest intact checkpoint, step, checkpoint, evaluate."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from moe.activity import doing
from moe.parallel import Layout, json_collectives, values_changed
from moe.parallel.problems import raise_on_all_ranks
from moe.plan import Plan
from moe.records import JsonRecord, ModuleReport
from moe.spec import JobSpec, ModuleModelSpec, Problem, SpecError, spec_error
from moe.spec.adapter import describe_base
from moe.spec.patterns import layer_pattern, matches
from moe.storage.folder import Folder
from moe.tasks.task import PreparedData, Task
from moe.train import expert_costs
from moe.train.batches import BatchPrefetcher
from moe.train.best_score import BestScore
from moe.train.checkpoint import marker as markers
from moe.train.checkpoint.checkpointer import Checkpointer
from moe.train.checkpoint.run_files import files_of, read_run_state, run_changes, run_files, run_state
from moe.train.checkpoint.state import run_tensors
from moe.train.checkpoint.tensor_piece import TensorPiece
from moe.train.control import Control, EndingAction, RequestedAction
from moe.train.kernel_notes import kernel_notes
from moe.train.nonfinite import NonFiniteLoss, first_fault
from moe.train.optimizer.build import set_step
from moe.train.optimizer.fused_adamw import FusedAdamW
from moe.train.profile import StepProfile
from moe.train.recorder import Recorder
from moe.train.signals import Signals
from moe.train.step import step as take_step
from moe.train.train_state import TrainState
from moe.train.unread_steps import LaunchedStep, UnreadSteps

REPORT = "report.json"
_ENDINGS: dict[EndingAction, Literal["paused", "cancelled", "preempted"]] = {
    "pause": "paused",
    "cancel": "cancelled",
    "preempt": "preempted",
}


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run and the step at which it ended, with a report if it succeeded."""

    kind: Literal["succeeded", "paused", "cancelled", "preempted"]
    step: int
    report: JsonRecord | None


def train(
    task: Task[Any, Any],
    plan: Plan,
    layout: Layout,
    *,
    data: PreparedData,
    storage: str,
    cache: Path,
    attempt: int,
    group: int,
    recorder: Recorder,
    control: Control,
    roots: Sequence[str] | None = None,
    pause_at: int | None = None,
) -> Outcome:
    """Train a task's model to `train.num_steps`, resuming from checkpoints in `storage`. Collective.

    Resumes from the newest intact checkpoint, of any number of ranks. `cache` is a folder on this machine for
    measured expert timings; user files must lie under `roots`. `attempt` and `group` name this worker group's
    checkpoints. Record n completes n steps. Rank 0 records metrics and checkpoints; every rank logs. A pause, a cancel
    or the notice that a rank's node is about to end commits a checkpoint before returning; so does `pause_at`, a step
    before the last at which the run pauses.

    Raises NonFiniteLoss on all ranks if training diverges, without applying the update; CheckpointError if the last
    checkpoint cannot be written or none can be read; SpecError if `storage` holds another run's checkpoints or lost
    the copy that `start_from` made, if the data changed or differs between ranks, or if the micro-batches do not
    cover all token groups.
    """
    require_same_data(data)
    require_all_groups(task.spec, plan, layout)
    spec, folder = task.spec, Folder.of_job(storage)
    evaluation = spec.train.evaluation
    with doing("loading", "building the model"):
        state = TrainState.build(task, layout)
    checkpointer = _checkpointer(state, plan, data, folder, attempt=attempt, group=group, recorder=recorder)
    if layout.rank == 0:
        _warn_about_router(spec, recorder)
        _log_trained_parameters(spec, recorder)
        if isinstance(state.optimizer, FusedAdamW):
            recorder.log("info", "AdamW, clipping and narrow copies run in one kernel")
    with doing("loading", "loading weights"):
        num_done = _resume(state, data, checkpointer, recorder, roots)
        if layout.rank == 0:
            recorder.record_resume(num_done, checkpointer.last_committed)
    with doing("loading", "timing expert backends"):
        _choose_backends(state, folder, cache, recorder)
    state.shard_masters()
    checkpointer.replace_tensors(_tensors(state))
    resumed_state, stream_position = _resumed_state(checkpointer, folder)
    batches = BatchPrefetcher(task.batches(data, plan, layout))
    if (note := batches.seek(num_done, stream_position)) is not None and layout.rank == 0:
        recorder.log("info", note)
    last_step = min(spec.train.num_steps, pause_at or spec.train.num_steps)
    trained_s, best = resumed_state.get("trained_s", 0.0), BestScore.of_job(spec, resumed_state.get("best"))
    profile, unread = StepProfile(spec.train.profile, folder, layout, recorder), UnreadSteps(layout)

    def state_after(step: int) -> bytes:
        return run_state(spec, data, step, trained_s, best, batches.position(step))

    try:
        while num_done < last_step and not best.is_stale(evaluation.stop_after):
            began = time.perf_counter()
            with doing("step", f"step {num_done + 1}"):
                batch = batches.take(num_done)
                request = _next_request(spec, control, trained_s) if layout.rank == 0 else None
                signals = Signals(request, *checkpointer.vote(), num_preempted=int(control.is_preempted()))
                with profile.trace_step(num_done + 1):
                    result = take_step(state, batch, signals)
                num_done += 1
                unread.add(LaunchedStep(result, batch, began, batches.waited_s))
                is_evaluated = _is_due(num_done, evaluation.every_steps)
                action = result.signals.action
                is_last = num_done == last_step or action is not None
                reads_all = is_evaluated or is_last or _is_due(num_done, spec.checkpoint.every_steps)
                steps_read = list(unread.read(reads_all=reads_all))
            for record, batch in steps_read:
                if not record.is_finite:
                    fault = first_fault(state, batch)
                    checkpointer.finish()
                    raise NonFiniteLoss(record.step, checkpointer.last_committed, fault)
                trained_s += record.step_s or 0.0
                record = replace(record, source_tokens=batch.source_tokens)
                if layout.rank == 0 and not (is_evaluated and record.step == num_done):
                    recorder.metric(record)
            if is_evaluated:
                with doing("evaluation", f"evaluating after step {num_done}"), state.evaluated_weights():
                    held_out = task.measure_held_out(state.model, layout, data)
                    samples = task.samples(state.model, layout, data)
                record = replace(
                    record, held_out=held_out.losses, samples=samples or None, label_loads=held_out.label_loads
                )
                if spec.checkpoint.keep_best and best.step is not None and not checkpointer.is_stored(best.step):
                    best = best.without_value()  # its checkpoint was lost, or could not be saved
                best = best.after(num_done, held_out.losses)
                if layout.rank == 0:
                    recorder.metric(record)

            with doing("checkpoint"):
                checkpointer.advance(result.signals.num_saved, result.signals.num_save_failed)
            if action == "finish":
                break
            if action is not None:
                checkpointer.save(num_done, state_after(num_done))
                return Outcome(_ENDINGS[action], num_done, None)
            is_best = spec.checkpoint.keep_best is not None and best.step == num_done
            if (is_best or _is_due(num_done, spec.checkpoint.every_steps)) and num_done < last_step:
                checkpointer.start(num_done, state_after(num_done))
        is_paused = num_done == last_step < spec.train.num_steps
        if layout.rank == 0 and not is_paused:
            recorder.record_finish(num_done, "saving")
        checkpointer.save(num_done, state_after(num_done))
        if is_paused:
            return Outcome("paused", num_done, None)
    finally:
        batches.close()
        profile.close()

    if layout.rank == 0 and best.value is not None:
        recorder.log("info", str(best))
    report = _final_report(state, data, folder, recorder, num_done)
    return Outcome("succeeded", num_done, report)


def _checkpointer(
    state: TrainState, plan: Plan, data: PreparedData, folder: Folder, *, attempt: int, group: int, recorder: Recorder
) -> Checkpointer:
    spec, layout = state.task.spec, state.layout
    return Checkpointer(
        folder.subfolder(markers.FOLDER),
        layout,
        _tensors(state),
        attempt=attempt,
        group=group,
        keep=spec.checkpoint.keep,
        keep_best=spec.checkpoint.keep_best is not None,
        files=run_files(spec, plan, data) if layout.rank == 0 else {},
        recorder=recorder,
    )


def _tensors(state: TrainState) -> dict[str, Tensor | TensorPiece]:
    """Tensors of a checkpoint."""
    omitted, updated = state.task.omitted_from_checkpoints(), state.shards.parameters
    return run_tensors(
        state.model, state.stored_parameters, state.optimizer, state.layout, omitted, state.average, updated
    )


def _choose_backends(state: TrainState, folder: Folder, cache: Path, recorder: Recorder) -> None:
    """Choose how experts are computed, by measured times, and log the choice and parts without kernels. Collective."""
    layers, device = state.moe_layers.local_layers.values(), state.layout.device
    costs = expert_costs.decide(layers, device, state.dtype, folder, cache / "experts")
    notes_by_rank = json_collectives.all_gather_json(kernel_notes(state.model, device, state.dtype))
    if state.layout.rank == 0:
        notes = dict.fromkeys(
            note for notes in notes_by_rank for note in notes
        )  # pipeline stages have different layers
        for line in (*expert_costs.describe(costs), *notes):
            recorder.log("info", line)


def _final_report(
    state: TrainState, data: PreparedData, folder: Folder, recorder: Recorder, num_steps: int
) -> JsonRecord:
    """Report of the finished model, which rank 0 also writes to storage. Collective."""
    task, layout = state.task, state.layout
    if layout.rank == 0:
        recorder.record_finish(num_steps, "evaluating")
    with doing("evaluation", "evaluating the finished model"), state.evaluated_weights():
        report = task.evaluate(state.model, layout, data)
    if isinstance(report, ModuleReport):
        report = replace(report, num_steps=num_steps)  # fewer than requested if `max_duration` ran out
    if layout.rank == 0:
        folder.write(REPORT, json.dumps(report.to_plain(), indent=1, ensure_ascii=False).encode())
    return report


def _next_request(spec: JobSpec, control: Control, trained_s: float) -> RequestedAction | None:
    """Request that rank 0 passes to all ranks."""
    limit_s = spec.train.max_duration_s
    return "finish" if limit_s is not None and trained_s >= limit_s else control.poll()


def _resumed_state(checkpointer: Checkpointer, folder: Folder) -> tuple[dict[str, Any], Any]:
    """(`run.json` of the checkpoint that the run resumed from, empty if it was copied from another job; its position in
    a stream, also if it was copied). Collective."""
    name = checkpointer.last_committed
    if name is None:
        return {}, None
    checkpoint = folder.subfolder(markers.FOLDER).subfolder(name)
    state = dict(json_collectives.broadcast_from_rank0(lambda: read_run_state(checkpoint)))
    data = state.get("data")
    position = data.get("stream") if isinstance(data, dict) else None
    return {} if markers.is_copy(name) else state, position


def require_same_data(data: PreparedData) -> None:
    """Raise SpecError on all ranks unless all prepared the same data. Collective.

    Data may change while ranks start.
    """
    keys = sorted(set(json_collectives.all_gather_json(data.key)))
    if len(keys) > 1:
        rule = f"differs between workers (prepared as {' and as '.join(keys)}): it changed meanwhile"
        raise spec_error(
            "changed", "data", None, rule, "leave its files unchanged while a run starts, and submit it again"
        )


def require_all_groups(spec: JobSpec, plan: Plan, layout: Layout) -> None:
    """Raise SpecError unless the micro-batches hold all token groups of a data rank."""
    batch_groups, number = plan.options.micro_batch_groups, plan.options.num_micro_batches
    groups = -(-spec.num_groups // layout.data_ranks)
    if batch_groups * number < groups:
        rule = f"times micro_batch_groups (={batch_groups}) must cover the {groups} groups of a data rank"
        raise spec_error(
            "out_of_range", "plan.options.num_micro_batches", number, rule, f"use {-(-groups // batch_groups)}"
        )


def _warn_about_router(spec: JobSpec, recorder: Recorder) -> None:
    """Warn about a router that nothing trains. New jobs with one are refused; resumed ones go on."""
    moe = spec.model.moe
    if moe is not None and (never := moe.routing.never_trained()) is not None:
        recorder.log("warning", str(replace(never, path=f"model.moe.{never.path}", remedy="")))


def _log_trained_parameters(spec: JobSpec, recorder: Recorder) -> None:
    """Log the trained share of all weights and the kinds of frozen parameters, or of adapters.

    Skips user modules, and models without frozen parameters.
    """
    if isinstance(spec.model, ModuleModelSpec):
        return
    kinds, counts = {True: dict[str, None](), False: dict[str, None]()}, {True: 0, False: 0}
    for parameter in spec.model.parameters():
        is_frozen = parameter.frozen or any(matches(pattern, parameter.name) for pattern in spec.train.freeze)
        counts[is_frozen] += parameter.numel
        kinds[is_frozen][layer_pattern(parameter.name)] = None
    if not counts[True]:
        return
    has_adapters = getattr(spec.model, "adapter", None) is not None
    details = f": {', '.join(kinds[False])}" if has_adapters else f"; frozen: {', '.join(kinds[True])}"
    share = counts[False] / sum(counts.values())
    recorder.log("info", f"{share:.2%} of all {sum(counts.values()):,} weights are trained{details}")
    if has_adapters:
        recorder.log("info", describe_base(spec.model.parameters(), 8 if spec.train.dtype == "float64" else 4))


def _resume(
    state: TrainState, data: PreparedData, checkpointer: Checkpointer, recorder: Recorder, roots: Sequence[str] | None
) -> int:
    """Load the newest intact checkpoint or the initial weights; return the number of finished steps."""
    spec, layout = state.task.spec, state.layout

    def check(parameters: Folder) -> None:
        # Collective: each rank reads its machine's data and packages; all raise the same problems.
        own_problems = run_changes(spec, data, parameters) or _other_base(state.task, parameters, roots)
        raise_on_all_ranks(own_problems)

    notes: Sequence[str] = ()
    if state.task.omitted_from_checkpoints():
        notes = state.task.begin(state.model, layout, roots)
    state.task.begin_reference(layout, roots)
    marker = checkpointer.restore(check)
    values_changed(state.parameters)
    if marker is None:
        if spec.start_from is not None:
            rule = f"is where this run starts, but its copy in {checkpointer.url} is gone or damaged"
            remedy = "resume the job when its storage is intact again, or submit it anew"
            raise spec_error("not_found", "start_from.job", spec.start_from.job, rule, remedy)
        if checkpointer.has_skipped_checkpoints and layout.rank == 0:
            recorder.log("warning", "no complete checkpoint: the run starts over at step 0")
        if not state.task.omitted_from_checkpoints():
            notes = state.task.begin(state.model, layout, roots)
        notes = (*notes, *state.task.begin_trained(state.model, layout, roots))
        values_changed(state.parameters)
        for note in notes if layout.rank == 0 else ():
            recorder.log("info", note)
        return 0
    set_step(state.optimizer, marker.step)
    if layout.rank == 0:
        recorder.log(
            "info",
            f"resumed at step {marker.step} from {marker.name} of {marker.num_workers} workers on {layout.world_size}",
        )
    return marker.step


def _other_base(task: Task[Any, Any], checkpoint: Folder, roots: Sequence[str] | None) -> list[Problem]:
    """Problems of base weights that differ from those that the checkpoint's adapter was trained with."""
    try:
        task.check_base(files_of(checkpoint), roots)
    except SpecError as error:
        return list(error.problems)
    return []


def _is_due(step: int, every_steps: int | None) -> bool:
    return every_steps is not None and step % every_steps == 0

"""Rules of training settings that depend on the model, the data or the hardware."""

from collections.abc import Iterator

from moe.spec.conversations import PreferenceSpec, UnpairedPreferenceSpec
from moe.spec.data import DataSpec
from moe.spec.errors import Problem
from moe.spec.language import LanguageModelSpec
from moe.spec.model import ModelSpec
from moe.spec.optimizer import MuonSpec
from moe.spec.patterns import layer_pattern, matches
from moe.spec.resources import CheckpointSpec, ResourcesSpec
from moe.spec.train import EvaluationSpec, TrainSpec


def problems_of_freezing(model: ModelSpec, train: TrainSpec) -> Iterator[Problem]:
    """Problems of patterns that match nothing, or leave nothing to train."""
    if not train.freeze:
        return
    table = model.parameters()
    names = [parameter.name for parameter in table]
    for index, pattern in enumerate(train.freeze):
        if not any(matches(pattern, name) for name in names):
            kinds = list(dict.fromkeys(layer_pattern(name) for name in names))
            yield Problem("not_found", f"train.freeze[{index}]", pattern, "matches no parameter of the model",
                          f"use one of {', '.join(kinds)}")  # fmt: skip
    trained_names = (parameter.name for parameter in table if not parameter.frozen)
    if all(any(matches(pattern, name) for pattern in train.freeze) for name in trained_names):
        yield Problem("empty", "train.freeze", list(train.freeze), "leaves nothing to train", "freeze fewer parameters")


def problems_of_optimizer(model: ModelSpec, train: TrainSpec) -> Iterator[Problem]:
    """Problems of parameter groups, and of Muon without a matrix to update."""
    optimizer = train.optimizer
    if not optimizer.groups and not isinstance(optimizer, MuonSpec):
        return
    trained_parameters = [
        parameter for parameter in model.parameters()
        if not parameter.frozen and not any(matches(pattern, parameter.name) for pattern in train.freeze)
    ]  # fmt: skip
    yield from optimizer.group_problems([parameter.name for parameter in trained_parameters])
    if isinstance(optimizer, MuonSpec) and not any(parameter.is_hidden_matrix for parameter in trained_parameters):
        yield Problem("not_applicable", "train.optimizer.name", optimizer.name,
                      "does not apply if no hidden matrix is trained", "use adamw, or freeze less")  # fmt: skip


def problems_of_graphs(
    model: ModelSpec, data: DataSpec, train: TrainSpec, resources: ResourcesSpec
) -> Iterator[Problem]:
    """Problems of CUDA graphs, whose replays repeat the numbers of the host: random choices would not change."""
    if not train.cuda_graphs:
        return

    def problem(rule: str, remedy: str) -> Problem:
        return Problem("not_applicable", "train.cuda_graphs", True, rule, remedy)

    if resources.device == "cpu":
        yield problem("does not apply to resources.device (='cpu')", "omit it, or train on GPUs")
    if not isinstance(model, LanguageModelSpec):
        yield problem(f"does not apply to a {model.kind} model", "omit it")
        return
    if isinstance(data, PreferenceSpec | UnpairedPreferenceSpec):
        yield problem(f"does not apply to the corpus {data.corpus}", "omit it, or use another corpus")
    if model.adapter is not None and model.adapter.dropout:
        yield problem(f"does not apply with model.adapter.dropout (={model.adapter.dropout})",
                      "omit it, or set dropout to 0")  # fmt: skip
    moe = model.moe
    if moe is not None and moe.input_jitter:
        yield problem(f"does not apply with model.moe.input_jitter (={moe.input_jitter})",
                      "omit it, or set input_jitter to 0")  # fmt: skip
    if moe is not None and moe.routing.chooses_at_random:
        yield problem(f"does not apply to model.moe.router (={moe.routing.router!r}), which chooses experts at random",
                      "omit it, or use softmax_topk")  # fmt: skip


def problems_of_evaluation(model: ModelSpec, train: TrainSpec) -> Iterator[Problem]:
    """Problems of fields for the other kind of model: pairs are of translation, sequences and prompts of language."""
    own_field, foreign_field = ("max_sequences", "max_pairs") if isinstance(model, LanguageModelSpec) else (
        "max_pairs", "max_sequences")  # fmt: skip
    for name in (foreign_field, f"{foreign_field}_along_the_way"):
        if (value := getattr(train.evaluation, name)) != EvaluationSpec.model_fields[name].default:
            yield Problem("not_applicable", f"train.evaluation.{name}", value,
                          f"does not apply to a {model.kind} model",
                          f"use {name.replace(foreign_field, own_field)}")  # fmt: skip
    if train.evaluation.prompts and not isinstance(model, LanguageModelSpec):
        yield Problem("not_applicable", "train.evaluation.prompts", list(train.evaluation.prompts),
                      f"does not apply to a {model.kind} model", "omit it")  # fmt: skip


def problems_without_evaluation(data: DataSpec, train: TrainSpec, checkpoint: CheckpointSpec) -> Iterator[Problem]:
    """Problems of fields that need the periodic evaluation: prompts, the best checkpoint, stopping early."""
    keep_best, evaluation = checkpoint.keep_best, train.evaluation
    fields = {
        "train.evaluation.prompts": list(evaluation.prompts) or None,
        "train.evaluation.stop_after": evaluation.stop_after,
        "checkpoint.keep_best": None if keep_best is None else keep_best.metric,
    }
    if (
        evaluation.prompt_max_tokens != EvaluationSpec.model_fields["prompt_max_tokens"].default
        and not fields["train.evaluation.prompts"]
    ):
        yield Problem("not_applicable", "train.evaluation.prompt_max_tokens", evaluation.prompt_max_tokens,
                      "has no effect without prompts", "set train.evaluation.prompts, or omit it")  # fmt: skip
    names = getattr(data, "held_out_sets", None)  # synthetic data has none and is never trained on
    for path, value in fields.items():
        if value is None:
            continue
        if evaluation.every_steps is None:
            yield Problem("requires", path, value, "requires periodic evaluation", "set train.evaluation.every_steps")
        if names == () and path != "train.evaluation.prompts":
            yield Problem("requires", path, value, "requires held-out data", "raise data.held_out")
    if names and keep_best is not None and keep_best.held_out_set not in (None, *names):
        choices = ", ".join(("held_out", *(f"held_out.{name}" for name in names)))
        yield Problem("not_found", "checkpoint.keep_best.metric", keep_best.metric, "names no held-out set of the data",
                      f"use one of {choices}")  # fmt: skip

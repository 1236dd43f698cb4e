"""Problems of preference losses and their corpora."""

from collections.abc import Iterator

from moe.spec.conversations import PreferenceSpec, UnpairedPreferenceSpec
from moe.spec.data import PairsSpec, SequencesSpec, SyntheticSpec
from moe.spec.errors import Problem
from moe.spec.language import LanguageModelSpec
from moe.spec.train import LOSSES_WITH_REFERENCE, UNPAIRED_LOSSES, TrainSpec

_FIELDS = ("preference_loss", "preference_beta", "preference_margin", "desirable_weight", "undesirable_weight")


def problems_of_preferences(
    model: LanguageModelSpec, data: SyntheticSpec | SequencesSpec | PairsSpec, train: TrainSpec
) -> Iterator[Problem]:
    """Problems of a job's fields that apply only to preferences, only to some of their losses, or not to them."""
    corpus = data.corpus
    if not isinstance(data, PreferenceSpec | UnpairedPreferenceSpec):
        for name in _FIELDS:
            if (value := getattr(train, name)) != TrainSpec.model_fields[name].default:
                rule = "applies only to the corpora preference and unpaired_preference"
                yield Problem("not_applicable", f"train.{name}", value, rule, "omit it")
        return
    saved = () if model.adapter is None else model.adapter.modules_to_save
    if train.preference_loss in LOSSES_WITH_REFERENCE and saved:
        yield Problem("not_applicable", "model.adapter.modules_to_save", list(saved),
                      f"does not apply to {train.preference_loss}, whose reference is the base without its adapter",
                      "omit it, or use simpo or orpo")  # fmt: skip
    if train.label_smoothing:
        yield Problem("not_applicable", "train.label_smoothing", train.label_smoothing,
                      f"does not apply to the corpus {corpus}", "omit it")  # fmt: skip
    is_unpaired = isinstance(data, UnpairedPreferenceSpec)
    if is_unpaired and train.preference_loss not in UNPAIRED_LOSSES:
        yield Problem("not_applicable", "train.preference_loss", train.preference_loss,
                      f"does not apply to the corpus {corpus}", "use kto or apo_zero_unpaired")  # fmt: skip
    elif not is_unpaired and train.preference_loss in UNPAIRED_LOSSES:
        yield Problem("not_applicable", "train.preference_loss", train.preference_loss,
                      f"does not apply to the corpus {corpus}",
                      "use the corpus unpaired_preference, which takes pairs too")  # fmt: skip
    if train.preference_margin is not None and train.preference_loss != "simpo":
        yield Problem("not_applicable", "train.preference_margin", train.preference_margin,
                      f"does not apply to the preference_loss {train.preference_loss}", "omit it")  # fmt: skip
    yield from _problems_of_labels(train)
    if is_unpaired and train.preference_loss == "kto" and train.batch_tokens < 2 * data.max_tokens:
        yield Problem("out_of_range", "train.batch_tokens", train.batch_tokens,
                      f"must hold two sequences of data.max_tokens (={data.max_tokens}) with kto, whose KL estimate "
                      "combines prompts with completions of other records",
                      f"use {2 * data.max_tokens} or more, or apo_zero_unpaired")  # fmt: skip


def _problems_of_labels(train: TrainSpec) -> Iterator[Problem]:
    """Problems of the weights of labels."""
    weights = {name: getattr(train, name) for name in ("desirable_weight", "undesirable_weight")}
    if train.preference_loss not in UNPAIRED_LOSSES:
        for name, weight in weights.items():
            if weight is not None:
                yield Problem("not_applicable", f"train.{name}", weight,
                              f"does not apply to the preference_loss {train.preference_loss}", "omit it")  # fmt: skip
    elif all(weight == 0 for weight in weights.values()):
        yield Problem("out_of_range", "train.desirable_weight", 0.0,
                      "must be above 0 if train.undesirable_weight is 0", "raise one of them")  # fmt: skip

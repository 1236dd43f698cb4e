"""Values of step records by the names that all trackers show them under."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TRAIN = ("loss", "nll", "aux_loss", "z_loss", "indexer_loss", "grad_norm", "lr", "tokens")
_SPEED = ("tokens_per_s", "step_s", "data_s")
_LAYER = ("max_over_mean", "dropped", "rejected", "entropy", "all_to_all_s", "waiting_s")
_LARGEST = ("max_over_mean",)
"""Values of layers whose largest one is shown; of the others, the mean."""
_PREFERENCE_CORPORA = ("preference", "unpaired_preference")
MAX_SCORES = 200


@dataclass(frozen=True)
class StepValues:
    """Values of one step."""

    step: int
    time_s: float
    """Unix time of the record."""
    scalars: dict[str, float]
    samples: tuple[tuple[str, str], ...] = ()
    """(prompt, completion) pairs."""


def number_prefix(spec: Mapping[str, Any]) -> str:
    """Prefix of a record's `numbers`: a job with answers to prefer has KTO's rewards there, others a user module's."""
    data = spec.get("data")
    return "preference" if isinstance(data, Mapping) and data.get("corpus") in _PREFERENCE_CORPORA else "module"


def step_values(text: str, time_s: float, layers: bool = False, numbers: str = "module") -> StepValues:
    """Values of a `metric` event's data, which is JSON. Values that are not finite are left out, as in the record.
    `layers`: also those of every MoE layer. `numbers`: the job's `number_prefix`.

    Reads the JSON by itself: `StepRecord.read` validates every load of every expert, which takes far longer.
    """
    data = json.loads(text)
    scalars: dict[str, float] = {}
    for prefix, names in (("train", _TRAIN), ("speed", _SPEED)):
        _collect(scalars, prefix, data, names)
    for prefix, key in (("held_out", "held_out"), (numbers, "numbers")):
        if isinstance(group := data.get(key), dict):
            _collect(scalars, prefix, group, group)
    if isinstance(records := data.get("layers"), list):
        balances = [layer for layer in records if isinstance(layer, dict)]
        _collect_balance(scalars, balances)
        if layers:
            for layer in balances:
                _collect(scalars, f"layer_{layer.get('layer')}", layer, _LAYER)
    samples = data.get("samples")
    pairs = tuple((str(sample["prompt"]), str(sample["completion"])) for sample in samples) if samples else ()
    return StepValues(int(data["step"]), time_s, scalars, pairs)


def has_evaluation(text: str) -> bool:
    """Whether a `metric` event's data has held-out losses or samples."""
    return '"held_out":' in text or '"samples":' in text


def _collect(scalars: dict[str, float], prefix: str, fields: Mapping[str, Any], names: Iterable[str]) -> None:
    for name in names:
        if (number := _finite(fields.get(name))) is not None:
            scalars[f"{prefix}/{name}"] = number


def _collect_balance(scalars: dict[str, float], layers: Sequence[Mapping[str, Any]]) -> None:
    for name in _LAYER:
        values = [number for layer in layers if (number := _finite(layer.get(name))) is not None]
        if values:
            scalars[f"experts/{name}"] = max(values) if name in _LARGEST else sum(values) / len(values)


def _finite(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def scores_of(report: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of an evaluation report by path, such as `final/sets/seen/loss`."""
    return dict(list(_leaves("final", report))[:MAX_SCORES])


def _leaves(path: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _leaves(f"{path}/{key}", entry)
    elif (number := _finite(value)) is not None:
        yield path, number

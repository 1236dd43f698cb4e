"""Adapters in PEFT's format, in and out: `adapter_config.json`, and `adapter_model.safetensors` with the names that
PEFT's wrappers have around the modules of transformers' model.

Experts are two fused parameters there. Their A is `[E · r, in]`, expert by expert, and their B `[out, r · E]`, whose
columns go by rank first.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe.interchange.catalog import PLAIN, Held
from moe.interchange.config import written
from moe.interchange.copying import fill_ours, unchecked
from moe.interchange.families import BY_TYPE
from moe.interchange.family import Family, sizes_of
from moe.interchange.fitting import rows_of
from moe.interchange.headers import entries
from moe.interchange.hub_folder import HubFolder
from moe.interchange.origin import Origin
from moe.interchange.pieces import Piece, Slices, dimensions, piece
from moe.interchange.save import Made, write_folder
from moe.interchange.sources import Source
from moe.interchange.stored import NAMES, Stored
from moe.parallel import Layout, extent, local_parameters
from moe.spec import LanguageModelSpec, Problem, SpecError
from moe.spec.adapter import A, AdapterSpec, B, narrowed_by
from moe.spec.parameter import Parameter

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_FIRST, _SECOND = "gate_up_proj", "down_proj"
_DEFAULTS: Mapping[str, Any] = {
    "bias": "none", "fan_in_fan_out": False, "use_dora": False, "modules_to_save": None, "layers_to_transform": None,
    "layers_pattern": None, "rank_pattern": {}, "alpha_pattern": {}, "lora_bias": False, "megatron_config": None,
    "trainable_token_indices": None, "layer_replication": None, "alora_invocation_tokens": None, "use_qalora": False,
    "velora_config": None, "kasa_config": None, "arrow_config": None, "corda_config": None, "eva_config": None,
}  # fmt: skip
"""Keys that may have these values alone, or nothing in their place: others change what the adapter computes."""
_BEGINNINGS = (None, True, False, "gaussian", "orthogonal")
_AGAIN = "use an adapter of this model, or say in `adapter` what that one is"


@dataclass(frozen=True)
class Half:
    """A or B of one adapter, and where PEFT has it."""

    ours: str
    shape: tuple[int, ...]
    piece: Piece
    module: str
    """Path of the module of theirs that PEFT wraps."""
    parameter: str | None
    """Name within the module, where PEFT wraps a parameter: fused experts, routers, and in models with experts the
    other feed-forward layers too, since PEFT takes modules called `gate_proj` there for experts that it has to fuse."""


def halves(spec: LanguageModelSpec, family: Family) -> list[Half]:
    """Both halves of each adapter of a model. Raises SpecError for a matrix that PEFT's format has otherwise."""
    assert spec.adapter is not None
    table = {each.name: each for each in spec.parameters()}
    chosen = [each for name, each in table.items() if name + B in table]
    found, problems = [], []
    for each in chosen:
        layer, layouts = rows_of(spec, family, each.name)
        rows = layouts[-1] if layouts else []  # the last is that of their memory
        if len(rows) != 1:
            problems.append(_inexpressible(each.name, family))
            continue
        row, sizes = rows[0], {**sizes_of(spec), "rank": spec.adapter.rank}
        name = row.name_in(layer)
        module, _, last = name.rpartition(".")
        is_module = (
            spec.moe is None or ".attention." in each.name
        )  # a linear map, which PEFT wraps as a whole
        parameter = None if is_module else last
        for half, (shape, ours, theirs) in _patterns(
            each, row.patterns(len(each.shape), sizes), table
        ).items():
            nested = ".base_layer" if parameter == _FIRST and _wraps_both(each, table) else ""
            called = f"{_PREFIX}{module}{nested}.lora_{'A' if half == A else 'B'}.weight"
            made = piece(shape, ours, called, theirs, sizes)
            found.append(Half(each.name + half, shape, made, module, parameter))
    taken: dict[str, str] = {}
    for one in found:
        other = taken.setdefault(one.piece.name, one.ours)
        if other != one.ours and one.ours.endswith(A):
            problems.append(_inexpressible(one.ours, family))
    if problems:
        raise SpecError(problems)
    return found


def _inexpressible(name: str, family: Family) -> Problem:
    rule = f"has an adapter that PEFT's format has otherwise for a {family.model_types[0]}"
    return Problem(
        "adapter.targets", name, rule, "leave it out of targets, or merge the adapter into the weights"
    )


def _wraps_both(parameter: Parameter, table: Mapping[str, Parameter]) -> bool:
    """Whether both fused parameters of these experts have adapters: then one wrapper lies in the other."""
    return parameter.name.rpartition(".")[0] + f".w_out{B}" in table


def _patterns(
    parameter: Parameter, patterns: tuple[str, str], table: Mapping[str, Parameter]
) -> dict[str, tuple[tuple[int, ...], str, str]]:
    """(shape, our pattern, theirs) of each half, from those of the matrix."""
    ours, theirs = (dimensions(pattern) for pattern in patterns)
    if parameter.of_experts:
        experts, inputs, outputs = ours
        theirs.remove(experts)
        halves = {A: (f"{experts} {inputs} rank", f"({experts} rank) {inputs}")}
        widened = f"{experts} rank {outputs}", f"(rank {experts})"
    else:
        outputs, inputs = ours if parameter.name.endswith(".weight") else reversed(ours)
        halves = {A: (f"rank {inputs}", f"rank {inputs}")}
        widened = f"{outputs} rank", "rank"
    theirs.remove(inputs)
    halves[B] = widened[0], f"{theirs[0]} {widened[1]}"
    return {
        half: (table[parameter.name + half].shape, *each)
        for half, each in halves.items() if parameter.name + half in table
    }  # fmt: skip


def save_adapter(
    spec: LanguageModelSpec,
    source: Source,
    target: str | Path,
    *,
    origin: Origin | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write a model's adapter as PEFT has it, into a new folder, a path or an fsspec URL: all of it, or nothing.
    `origin` is the folder that the model began with. Where the source is collective all ranks call it. Raises
    SpecError on all of them."""
    every = halves(spec, _family(spec, origin))
    made: dict[str, list[Half]] = {}
    for each in every:
        made.setdefault(each.piece.name, []).append(each)
    tensors = [
        Made(
            name, NAMES[dtype], parts[0].piece.theirs.shape, tuple((one.ours, one.piece, 0) for one in parts)
        )
        for name, parts in sorted(made.items())
    ]
    assert spec.adapter is not None
    told = adapter_config(spec.adapter, every, None if origin is None else origin.url)
    small = {CONFIG: (json.dumps(told, indent=2) + "\n").encode()}
    write_folder([(WEIGHTS, tensors)], small, source, target)


def _family(spec: LanguageModelSpec, origin: Origin | None) -> Family:
    """That of the folder that the model began with, or the first that can say what it is."""
    config = written(spec, None, "float32") if origin is None else origin.config
    return BY_TYPE[str(config["model_type"])]


def adapter_config(adapter: AdapterSpec, every: Sequence[Half], base: str | None) -> dict[str, Any]:
    """`adapter_config.json`, as PEFT reads it."""
    alpha = float(adapter.rank) if adapter.alpha is None else adapter.alpha
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": adapter.rank, "lora_alpha": int(alpha) if alpha.is_integer() else alpha, "lora_dropout": 0.0,
        "use_rslora": adapter.rank_stabilized, "init_lora_weights": True,
        **{key: value for key, value in _DEFAULTS.items() if key in ("bias", "fan_in_fan_out", "use_dora")},
        "target_modules": sorted({each.module for each in every if each.parameter is None}),
        "target_parameters": _in_order({f"{each.module}.{each.parameter}" for each in every if each.parameter}),
    }  # fmt: skip


def _in_order(names: set[str]) -> list[str]:
    """The outer one of two wrappers last."""
    return sorted(names, key=lambda name: (name.rpartition(".")[0], name.endswith(_SECOND)))


class Merged(Source):
    """A model's parameters with its adapters added to the matrices that they lie beside."""

    def __init__(self, source: Source, spec: LanguageModelSpec) -> None:
        assert spec.adapter is not None
        self._source, self._rank, self._scale = source, spec.adapter.rank, spec.adapter.scale
        table = {each.name: each for each in spec.parameters()}
        self._adapted = {name: each for name, each in table.items() if name + B in table}
        self.is_collective = source.is_collective

    def read(self, name: str, within: Slices, dtype: torch.dtype | None = None) -> Tensor:
        if (matrix := self._adapted.get(name)) is None:
            return self._source.read(name, within, dtype)
        *experts, first, second = within
        rank = 0, self._rank
        inputs, outputs = (second, first) if name.endswith(".weight") else (first, second)
        base = self._source.read(name, within)
        if matrix.of_experts:
            a = self._source.read(narrowed_by(name), (*experts, inputs, rank))
            b = self._source.read(name + B, (*experts, rank, outputs))
        else:
            a = self._source.read(name + A, (rank, inputs))
            b = self._source.read(name + B, (outputs, rank))
        if not base.numel():  # on a rank that only sends
            return base
        wide = torch.promote_types(base.dtype, torch.float32)
        a, b = a.to(wide), b.to(wide)
        product = a @ b if matrix.of_experts else b @ a
        is_turned = not matrix.of_experts and not name.endswith(".weight")
        return base.to(wide).add(product.t() if is_turned else product, alpha=self._scale)

    def finish(self) -> None:
        self._source.finish()


def load_adapter(
    folder: str,
    model: nn.Module,
    spec: LanguageModelSpec,
    layout: Layout | None = None,
    *,
    origin: Origin | None = None,
    roots: Sequence[str] | None = None,
    place: str = "folder",
) -> None:
    """Fill this rank's part of a model's adapter from a folder of PEFT's, called `place` in errors. All that its config
    and headers tell is checked before a weight is read. Raises SpecError for an adapter of another base, rank or kind,
    with both sides."""
    layout = layout or Layout.single()
    found = HubFolder(folder, roots, place)
    assert spec.adapter is not None
    problems = list(_misfits(found.read_json(CONFIG), spec.adapter, found.path(CONFIG)))
    location = found.find(WEIGHTS)
    held = {each.name: Held(each.name, each.shape, each) for each in entries(WEIGHTS, location, place)}
    every = {each.ours: each for each in halves(spec, _family(spec, origin))}
    wanted = {each.piece.name: each.piece.theirs.shape for each in every.values()}
    where = found.path(WEIGHTS)
    for name, shape in wanted.items():
        if name not in held:
            problems.append(Problem(f"{where}:{name}", None, f"is missing, of shape {list(shape)}", _AGAIN))
        elif held[name].shape != shape:
            problems.append(Problem(f"{where}:{name}", list(held[name].shape), f"must have the shape {list(shape)}",
                                    _AGAIN))  # fmt: skip
        elif held[name].entry.dtype not in PLAIN:
            problems.append(Problem(f"{where}:{name}", held[name].entry.dtype, f"must be one of {', '.join(PLAIN)}",
                                    "convert it to float32"))  # fmt: skip
    problems += [
        Problem(f"{where}:{name}", list(held[name].shape), "is no part of the adapter that this model has", _AGAIN)
        for name in held if name not in wanted
    ]  # fmt: skip
    if problems:
        raise SpecError(problems)
    stored = Stored(held, {WEIGHTS: location})
    try:
        with torch.no_grad():
            for each in local_parameters(model):
                if each.name in every:
                    first = tuple(low for low, _ in extent(each.part, layout))
                    fill_ours(each.local.detach(), first, [every[each.name].piece], stored.read, unchecked)
    finally:
        stored.close()


def _misfits(config: Mapping[str, Any], adapter: AdapterSpec, where: str) -> Iterator[Problem]:
    alpha = float(adapter.rank) if adapter.alpha is None else adapter.alpha
    for key, value in {"peft_type": "LORA", "r": adapter.rank, "lora_alpha": alpha}.items():
        if key not in config:
            yield Problem(f"{where}:{key}", None, "is missing", _AGAIN)
        elif config[key] != value:
            yield Problem(f"{where}:{key}", config[key], f"must be {value!r} here", _AGAIN)
    for key, value in {**_DEFAULTS, "use_rslora": adapter.rank_stabilized}.items():
        if (said := config.get(key, value)) != value and (said or value):
            yield Problem(f"{where}:{key}", said, f"must be {value!r} here", _AGAIN)
    if (begun := config.get("init_lora_weights")) not in _BEGINNINGS:
        yield Problem(f"{where}:init_lora_weights", begun, "changes the weights beneath it, which are not those here",
                      "convert it to a plain adapter, as PEFT can when it saves one")  # fmt: skip

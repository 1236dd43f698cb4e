"""Loading and saving of adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from moe.interchange.adapter_config import CONFIG, WEIGHTS, adapter_config
from moe.interchange.adapter_folder import AdapterFolder
from moe.interchange.adapter_parts import Half, adapter_tensors, halves, places_of, saved_modules, token_row_pieces
from moe.interchange.card import adapter_card
from moe.interchange.catalog import family_in
from moe.interchange.config import build_config, family_of
from moe.interchange.copying import fill_parameter
from moe.interchange.family import Family
from moe.interchange.fitting import untrained_parts
from moe.interchange.hub_folder import HubFolder
from moe.interchange.load import collect_problems
from moe.interchange.origin import Origin
from moe.interchange.save import CARD, TensorToWrite, shared_files, write_folder
from moe.interchange.sources import TensorSource
from moe.interchange.tensor_reader import NAMES, TensorReader
from moe.parallel import Layout, extent, local_parameters
from moe.parallel.problems import raise_on_all_ranks
from moe.spec import LanguageModelSpec, Problem, SpecError
from moe.spec.adapter_names import TOKEN_ROWS


def save_adapter(
    spec: LanguageModelSpec,
    source: TensorSource,
    target: str | Path,
    *,
    origin: Origin | None = None,
    dtype: torch.dtype = torch.float32,
    files: Mapping[str, bytes] | None = None,
    facts: Mapping[str, str] | None = None,
) -> None:
    """Write a model's adapter in PEFT's format to a new folder (a path or fsspec URL), atomically. `origin` is the
    pretrained folder; its tokenizer, `files` (further small files by path) and a model card with the `facts` are
    written next to the adapter. Collective if the source is. Raises SpecError on all ranks."""
    adapter = spec.adapter
    assert adapter is not None
    family = _family(spec, origin)
    adapter_halves = halves(spec, family)
    halves_by_tensor: dict[str, list[Half]] = {}
    for half in adapter_halves:
        halves_by_tensor.setdefault(half.tensor_name, []).append(half)
    tensors = [
        TensorToWrite(
            name,
            NAMES[dtype],
            parts[0].tensor_shape,
            tuple((half.parameter_name, piece, 0) for half in parts for piece in half.pieces),
        )
        for name, parts in sorted(halves_by_tensor.items())
    ]
    modules = {name: module for name, module in saved_modules(spec, family).items() if adapter.saves(name)}
    rows = token_row_pieces(spec, family)
    tensors += [
        TensorToWrite(piece.name, NAMES[dtype], piece.tensor_side.shape, ((name, piece, 0),))
        for name, (_, piece) in {**modules, **rows}.items()
    ]
    places, base = places_of(adapter_halves), None if origin is None else origin.url
    names = adapter_tensors(spec, family)
    if origin is not None:
        names |= untrained_parts(family, origin.config, {*origin.untrained_names})[1]
    config = adapter_config(
        adapter, places, names, base, is_multimodal=family.wrapper is not None,
        saved_modules=[place.module for place, _ in modules.values()],
        token_ids={} if adapter.trainable_token_indices is None else {
            place.module: adapter.trainable_token_indices.ids_of(name.replace(TOKEN_ROWS, ".weight"))
            for name, (place, _) in rows.items()
        },
    )  # fmt: skip
    small = {
        **shared_files(origin, files or {}),
        CONFIG: (json.dumps(config, indent=2) + "\n").encode(),
        CARD: adapter_card(spec, facts or {}, origin, family, config).encode(),
    }
    write_folder([(WEIGHTS, tensors)], small, source, target)


def _family(spec: LanguageModelSpec, origin: Origin | None, roots: Sequence[str] | None = None) -> Family:
    """Family of the model's folder, else the first family that can represent the model."""
    if origin is None and spec.from_folder is not None:
        return family_in(HubFolder(spec.from_folder, roots))
    config = build_config(spec, None, "float32") if origin is None else origin.config
    return family_of(config, "config.json")


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
    """Load this rank's part of a model's adapter from a folder in PEFT's format, called `place` in errors. Collective.
    Checks config and headers before reading weights. Raises SpecError on every rank if it is raised on one, with both
    values if base, rank or kind differ."""
    layout = layout or Layout.single()
    problems: tuple[Problem, ...] = ()
    try:
        adapter_folder, family = AdapterFolder(folder, roots, place), _family(spec, origin, roots)
        parts, copies = adapter_folder.parts(spec, family), adapter_folder.base_copies(spec, family)
    except SpecError as error:
        problems = error.problems
    raise_on_all_ranks(problems)
    weights = TensorReader(adapter_folder.tensors, {WEIGHTS: adapter_folder.location})

    def fill() -> list[Problem]:
        check = _FiniteCheck(adapter_folder)
        for parameter in local_parameters(model):
            if parameter.name in parts:
                parameter.local.detach().zero_()  # as is B where it belongs to another A
                first = tuple(low for low, _ in extent(parameter.part, layout))
                fill_parameter(parameter.local.detach(), first, parts[parameter.name], weights.read, check)
            for copy in copies.get(parameter.name, ()):
                region = extent(parameter.part, layout)
                if not torch.equal(
                    copied_weights := weights.read(copy, region),
                    parameter.local.detach().cpu().to(copied_weights.dtype),
                ):
                    check.problems[copy] = adapter_folder.other_table(copy)
        return list(check.problems.values())

    try:
        with torch.no_grad():
            raise_on_all_ranks(collect_problems(folder, fill))
    finally:
        weights.close()


class _FiniteCheck:
    """Collects problems for tensors with infinite or NaN values, by name."""

    def __init__(self, folder: AdapterFolder) -> None:
        self._folder = folder
        self.problems: dict[str, Problem] = {}

    def __call__(self, name: str, block: Tensor) -> None:
        if block.numel() and not bool(torch.isfinite(block).all()):
            self.problems[name] = self._folder.not_finite(name)

"""Matches a folder's tensors to a model's, and reports all that are missing, unknown or of another shape together. No
torch."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from moe.interchange.catalog import Catalog
from moe.interchange.encoded import PLAIN
from moe.interchange.family import LAYER, Family, TensorRow, sizes_of
from moe.interchange.hub_folder import CONFIG
from moe.interchange.pieces import ParameterPiece
from moe.interchange.upcycled import is_new_in_mixture, piece_of
from moe.spec import LanguageModelSpec, Problem, SpecError, spec_error
from moe.spec.adapter_names import is_adapter

EMBEDDING = "embedding.weight"
"""Our parameter that tied models use instead of output weights."""
_LAYER = re.compile(r"layers\.(\d+)\.")
_BIAS = "feed_forward.moe.router_bias"
_MAX_UNCHECKED_EXPERTS = 100_000
"""Number of experts whose tensor names can be listed within a second."""
_SAME_SHAPES = "has the same shape as its transpose, and may be stored either way", "use another model"
_REMEDY = "use the folder as published, and remove the fields next to `from`"


@dataclass(frozen=True)
class ExpectedTensor:
    """A parameter or buffer of our model."""

    name: str
    shape: tuple[int, ...]
    is_buffer: bool = False


@dataclass
class Fit:
    """Match of a folder's tensors to a model's."""

    pieces: dict[str, tuple[ParameterPiece, ...]] = field(default_factory=dict)
    """Pieces by our name, without a mixture's tensors that its dense folder lacks."""
    mtp_tensors: tuple[str, ...] = ()
    """Hugging Face tensors of multi-token-prediction heads, which are copied but not trained."""
    other_tensors: tuple[str, ...] = ()
    """Tensors of other parts of a wrapper, which are copied likewise."""
    has_tied_head: bool = False
    """Whether a folder with tied embeddings also has output weights, which must then be equal."""

    @property
    def untrained_names(self) -> tuple[str, ...]:
        """Hugging Face tensors that are copied but not trained."""
        return tuple(sorted((*self.mtp_tensors, *self.other_tensors)))


def head_of(family: Family) -> str:
    """Name of the output weights on the hub."""
    (row,), *_ = family.rows("output.weight")
    return row.tensor_name


def expected_tensors(spec: LanguageModelSpec) -> Iterator[ExpectedTensor]:
    """Yield all tensors of a model that a folder holds, without adapters."""
    for parameter in spec.parameters():
        if not is_adapter(parameter.name):
            yield ExpectedTensor(parameter.name, parameter.shape)
    if spec.moe is None:
        return
    if spec.moe.routing.has_selection_bias:
        for layer in spec.moe_layers:
            yield ExpectedTensor(f"layers.{layer}.{_BIAS}", (spec.moe.num_experts,), is_buffer=True)


def rows_of(spec: LanguageModelSpec, family: Family, name: str) -> tuple[int | None, list[list[TensorRow]]]:
    """(layer or None, rows of the family's tables in each layout) of one of our tensors."""
    match = _LAYER.match(name)
    if match is None:
        return None, family.rows(name)
    layer, name_in_layer = int(match[1]), name[match.end() :]
    if name_in_layer.startswith("attention.") and not spec.has_full_attention(layer):
        name_in_layer = f"linear_{name_in_layer}"
    return layer, family.rows(LAYER + name_in_layer)


def alternatives(spec: LanguageModelSpec, family: Family, tensor: ExpectedTensor) -> list[tuple[ParameterPiece, ...]]:
    """Pieces of one of our tensors in each layout that a folder may have, the hub's first; empty if the family has no
    such tensor."""
    layer, layouts = rows_of(spec, family, tensor.name)
    sizes = sizes_of(spec)
    return [tuple(row.piece(tensor.shape, layer, sizes) for row in rows) for rows in layouts]


def _sources(spec: LanguageModelSpec, family: Family, tensor: ExpectedTensor) -> list[tuple[ParameterPiece, ...]]:
    """Like `alternatives`, for the pretrained folder, which is dense if the model is upcycled."""
    dense_piece = piece_of(spec, family, tensor.name, tensor.shape)
    return alternatives(spec, family, tensor) if dense_piece is None else [(dense_piece,)]


def fit(spec: LanguageModelSpec, folder_catalog: Catalog) -> Fit:
    """Match a folder's tensors to a model's. Raises SpecError with every mismatch and both shapes."""
    family, tensors = folder_catalog.description.family, folder_catalog.tensors
    _check_size(spec, folder_catalog)
    result, problems = Fit(), list(folder_catalog.problems)
    used_names: set[str] = set()
    for tensor in expected_tensors(spec):
        if is_new_in_mixture(spec, tensor.name):
            continue
        choices = _sources(spec, family, tensor)
        if not choices:
            problems.append(Problem("unknown_key", tensor.name, list(tensor.shape),
                                    f"does not belong to a {family.model_types[0]}", _REMEDY))  # fmt: skip
            continue
        names = [[name for piece in pieces for name in piece.names()] for pieces in choices]
        present = [index for index, choice_names in enumerate(names) if all(name in tensors for name in choice_names)]
        choice = next(iter(present), None)
        if len(present) > 1:  # the same names with other shapes, or other names too
            fitting = [index for index in present if not any(_shape_mismatches(folder_catalog, tensor, choices[index]))]
            choice = (*fitting, *present)[0]
            if any(names[index] == names[choice] and choices[index] != choices[choice] for index in fitting):
                problems.append(folder_catalog.problem("conflict", names[choice][0], *_SAME_SHAPES))
        if choice is None:
            problems += _missing(
                folder_catalog,
                tensor,
                min(names, key=lambda choice_names: sum(name not in tensors for name in choice_names)),
            )
            used_names.update(name for choice_names in names for name in choice_names)
            continue
        used_names.update(names[choice])
        problems += _shape_mismatches(folder_catalog, tensor, choices[choice])
        result.pieces[tensor.name] = choices[choice]
    if spec.tie_embeddings and (head := head_of(family)) in tensors:
        used_names.add(head)
        result.has_tied_head = True
    mtp_names, other_names = untrained_parts(family, folder_catalog.config, set(tensors) - used_names)
    result.mtp_tensors, result.other_tensors = tuple(sorted(mtp_names)), tuple(sorted(other_names))
    problems += [
        folder_catalog.problem("unknown_key", name, "is not a tensor of this model", _REMEDY, list(tensors[name].shape))
        for name in sorted(set(tensors) - used_names - mtp_names - other_names)
    ]
    problems += [
        folder_catalog.problem("dtype_mismatch", name, f"must be one of {', '.join(PLAIN)}",
                               "convert the folder to bfloat16", tensors[name].entry.dtype)
        for name in sorted(used_names & set(tensors))
        if not tensors[name].is_decoded and tensors[name].entry.dtype not in PLAIN
    ]  # fmt: skip
    if problems:
        raise SpecError(_distinct(problems))
    return result


def _check_size(spec: LanguageModelSpec, catalog: Catalog) -> None:
    """Raise SpecError for more experts than the folder can have, before listing their tensor names."""
    num_experts = 0 if spec.moe is None else len(spec.moe_layers) * spec.moe.num_experts
    if num_experts <= _MAX_UNCHECKED_EXPERTS or spec.upcycle is not None:
        return
    num_matrices = sum(math.prod(tensor.shape[:-2]) for tensor in catalog.tensors.values())
    if num_experts > num_matrices:
        rule = f"would have {num_experts:,} experts in all layers, but the folder has {num_matrices:,} matrices"
        raise spec_error("mismatch", catalog.folder.path(CONFIG), None, rule, _REMEDY)


def _distinct(problems: list[Problem]) -> Iterator[Problem]:
    """Yield distinct problems, in order: one Hugging Face tensor may contain two of our parameters."""
    seen_texts = set()
    for problem in problems:
        if str(problem) not in seen_texts:
            seen_texts.add(str(problem))
            yield problem


def _missing(catalog: Catalog, tensor: ExpectedTensor, names: list[str]) -> Iterator[Problem]:
    has_head = head_of(catalog.description.family) in names
    tie_hint = " (a model that ties it to the embedding sets tie_word_embeddings)" if has_head else ""
    for name in names:
        if name not in catalog.tensors:
            yield catalog.problem(
                "missing", name, f"is missing; {tensor.name} {list(tensor.shape)} needs it{tie_hint}", _REMEDY
            )


def _shape_mismatches(
    catalog: Catalog, tensor: ExpectedTensor, pieces: tuple[ParameterPiece, ...]
) -> Iterator[Problem]:
    for piece in pieces:
        for name in piece.names():
            if (shape := catalog.tensors[name].shape) != piece.tensor_side.shape:
                usage = f"for {tensor.name} {list(tensor.shape)}"
                rule = f"must have the shape {list(piece.tensor_side.shape)}, {usage}"
                yield catalog.problem("shape_mismatch", name, rule, _REMEDY, list(shape))


_MTP_PARTS = (".eh_proj.", ".enorm.", ".hnorm.", ".shared_head.")
"""Parts of tensor names that only a prediction head has. The number of heads in the config is not enough to identify
its layers."""


def untrained_parts(family: Family, config: Mapping[str, Any], names: set[str]) -> tuple[set[str], set[str]]:
    """(tensors of multi-token-prediction heads, tensors of a wrapper's other parts) among these."""
    heads, wrapper = _mtp_tensors(family, config, names), family.wrapper
    if wrapper is None:
        return heads, set()
    return heads, {name for name in names - heads if not wrapper.has_language_tensor(name)}


def _mtp_tensors(family: Family, config: Mapping[str, Any], names: set[str]) -> set[str]:
    """Tensors of multi-token-prediction heads: those with a prefix of their own, or in layers beyond the config's last
    that contain tensors of such a head."""
    if family.mtp_pattern is None:
        return set()
    prefix, placeholder, _ = family.mtp_pattern.partition("{beyond}")
    if not placeholder:
        return {name for name in names if name.startswith(prefix)}
    numbers = {name: name.removeprefix(prefix).split(".")[0] for name in names if name.startswith(prefix)}
    last = family.text_config(config).get("num_hidden_layers", family.defaults["num_hidden_layers"])
    heads = {number for name, number in numbers.items() if any(mark in name for mark in _MTP_PARTS)}
    return {
        name for name, number in numbers.items()
        if number in heads and number.isdecimal() and int(number) >= last
    }  # fmt: skip

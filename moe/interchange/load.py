"""Loading of a folder's weights into a placed model. Each rank reads only its own part; a failure on any rank fails
all."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor, nn

from moe.interchange.catalog import Catalog, catalog
from moe.interchange.copying import BLOCK_ELEMENTS, fill_parameter
from moe.interchange.derived import fill_derived
from moe.interchange.fitting import EMBEDDING, Fit, expected_tensors, fit, head_of
from moe.interchange.hub_folder import HubFolder
from moe.interchange.pieces import ParameterPiece
from moe.interchange.seals import faults
from moe.interchange.tensor_reader import TensorReader
from moe.interchange.upcycled import is_new_in_mixture
from moe.parallel import Layout, QuantScheme, extent, json_collectives, local_parameters, quant_schemes_of, shard_of
from moe.parallel.problems import raise_on_all_ranks
from moe.parallel.quantized import blocks, put, quantize
from moe.random import init_uniform_
from moe.spec import LanguageModelSpec, Problem, SpecError
from moe.spec.form import SCALES
from moe.spec.parameter import Slices

_AGAIN = "download the file again"


@dataclass(frozen=True)
class LoadReport:
    """Result of a load."""

    num_tensors: int
    """Number of the folder's tensors read on this rank."""
    notes: tuple[str, ...]
    """Notes for the user."""


@dataclass(frozen=True)
class _TensorPart:
    """This rank's part of a parameter or buffer, or of its quantized elements or scales."""

    name: str
    local: Tensor
    origin: tuple[int, ...]
    scheme: QuantScheme | None = None
    of_scales: bool = False

    @property
    def values(self) -> Slices:
        """Rectangle of the dequantized tensor that this part is computed from."""
        region = tuple((low, low + size) for low, size in zip(self.origin, self.local.shape, strict=True))
        return region if self.scheme is None else self.scheme.values_of(region, of_scales=self.of_scales)


def load_weights(
    folder: str,
    model: nn.Module,
    spec: LanguageModelSpec,
    layout: Layout | None = None,
    *,
    roots: Sequence[str] | None = None,
    seed: int = 0,
) -> LoadReport:
    """Load this rank's parameters and buffers from a folder in the Hugging Face format. Collective.

    Checks all headers, and reports all problems together, before reading weights. Conversion needs a few megabytes of
    memory. Raises SpecError on every rank if it is raised on one; the model must then be discarded. `roots` are the
    folders that may be read, as in `moe.data.locations`. Parts of a mixture that its dense folder lacks are drawn from
    `seed`.
    """
    layout = layout or Layout.single()
    problems: tuple[Problem, ...] = ()
    try:
        folder_catalog = catalog(HubFolder(folder, roots))
        fit_result = fit(spec, folder_catalog)
        parts = list(_parts(model, spec, layout))
    except SpecError as error:
        problems = error.problems
    raise_on_all_ranks(problems)
    reader, weights = _ReadRecord(folder_catalog), TensorReader(folder_catalog.tensors, folder_catalog.files)
    mixture_init = None if spec.upcycle is None else MixtureInit(spec, seed)
    try:
        raise_on_all_ranks(
            collect_problems(
                folder, lambda: faults(folder_catalog, weights, json_collectives.rank(), json_collectives.world_size())
            )
        )

        def fill() -> list[Problem]:
            for scheme, same_parts in _parts_by_source(parts):
                part, pieces = same_parts[0], fit_result.pieces.get(same_parts[0].name, ())
                if scheme is None:
                    fill_parameter(part.local, part.origin, pieces, weights.read, reader.check)
                else:
                    _fill_quantized(same_parts, scheme, pieces, weights, reader)
                if mixture_init is not None:
                    mixture_init.finish(part.name, part.local, part.origin)
                if fit_result.has_tied_head and part.name == EMBEDDING:
                    reader.problems += _check_tied(folder_catalog, weights, part, pieces[0].name)
            fill_derived(model, spec, layout, fit_result.pieces, weights.read, reader.check)
            return reader.problems

        with torch.no_grad():
            raise_on_all_ranks(collect_problems(folder, fill))
    finally:
        weights.close()
    return LoadReport(len(reader.read), (*folder_catalog.description.notes, *_notes(fit_result, spec)))


def _parts(model: nn.Module, spec: LanguageModelSpec, layout: Layout) -> Iterator[_TensorPart]:
    """Yield this rank's parts of a model, with their positions in the whole tensors."""
    shapes, schemes = ({tensor.name: tensor.shape for tensor in expected_tensors(spec)}, quant_schemes_of(model))
    for parameter in local_parameters(model):
        of_scales = (name := parameter.name.removesuffix(SCALES)) in schemes and name != parameter.name
        scheme = schemes.get(name)
        if name not in shapes:
            continue
        region = extent(parameter.part, layout)
        is_complete = scheme is not None or tuple(parameter.part.shape) == shapes[name]
        assert is_complete, f"{parameter.name} does not match its spec"
        assert tuple(end - first for first, end in region) == tuple(parameter.local.shape), parameter.name
        origin = tuple(first for first, _ in region)
        yield _TensorPart(name, parameter.local.detach(), origin, scheme, of_scales)
    for name, buffer in model.named_buffers():
        if name in shapes:
            yield _TensorPart(name, buffer.detach(), tuple(first for first, _ in extent(shard_of(buffer), layout)))


def _parts_by_source(parts: Sequence[_TensorPart]) -> Iterator[tuple[QuantScheme | None, list[_TensorPart]]]:
    """Group quantized elements and scales that are computed from the same rectangle; other parts are alone."""
    parts_by_key: dict[object, list[_TensorPart]] = {}
    for index, part in enumerate(parts):
        key = index if part.scheme is None else (part.name, part.values)
        parts_by_key.setdefault(key, []).append(part)
    for same_parts in parts_by_key.values():
        yield same_parts[0].scheme, same_parts


def _fill_quantized(
    parts: Sequence[_TensorPart],
    scheme: QuantScheme,
    pieces: Sequence[ParameterPiece],
    weights: TensorReader,
    reader: "_ReadRecord",
) -> None:
    """Fill quantized elements and scales of one rectangle of a tensor, dequantized to float32 in bounded blocks."""
    for block in blocks(parts[0].values, scheme.dim, "cpu", _order_of_reading(pieces[0])):
        first = [low for low, _ in block]
        values = torch.empty([end - low for low, end in block])
        fill_parameter(values, first, pieces, weights.read, reader.check)
        codes_and_scales = quantize(values, scheme)
        for part in parts:
            tensor = codes_and_scales[part.of_scales]
            assert tensor is not None
            put(tensor, scheme.codes_of(block, of_scales=part.of_scales), part.local, part.origin)


def _order_of_reading(piece: ParameterPiece) -> list[int]:
    """Our dimensions in the file's order: a block that is short in the first ones spans few rows of the file."""
    places = {dim: (len(piece.tensor_side.shape), 0) for dim in range(len(piece.parameter_side.shape))}
    for axis, (dim, _) in piece.parameter_side.steps.items():
        tensor_dim, step = piece.tensor_side.steps.get(axis, (-1, 0))
        places[dim] = min(places[dim], (tensor_dim, -step))
    return sorted(places, key=places.__getitem__)


class _ReadRecord:
    """Tensors that were read, and problems with their values."""

    def __init__(self, folder_catalog: Catalog) -> None:
        self._catalog = folder_catalog
        self.read: Counter[str] = Counter()
        self.problems: list[Problem] = []

    def check(self, name: str, block: Tensor) -> None:
        """Record a problem, once per tensor, for infinite or NaN values."""
        self.read[name] += 1
        # Both are NaN if any element is. A hundred times as fast as checking each element.
        if block.numel() == 0 or all(isfinite(float(end)) for end in torch.aminmax(block)):
            return
        problem = self._catalog.problem("not_finite", name, "contains infinite or NaN values", _AGAIN)
        if problem not in self.problems:
            self.problems.append(problem)


def _check_tied(folder_catalog: Catalog, weights: TensorReader, part: _TensorPart, embedding: str) -> Iterator[Problem]:
    """Yield a problem if output weights differ from the tensor `embedding` although config.json ties them."""
    rows, width = part.local.shape
    head = head_of(folder_catalog.description.family)
    first, column = part.origin
    for begin in range(first, first + rows, step := max(1, BLOCK_ELEMENTS // max(1, width))):
        region = ((begin, min(begin + step, first + rows)), (column, column + width))
        if not torch.equal(weights.read(head, region), weights.read(embedding, region)):
            yield folder_catalog.problem("mismatch", head,
                                f"must equal {embedding}, as tie_word_embeddings requires",
                                "to keep both, set `tie_embeddings: false` next to `from`")  # fmt: skip
            return


def collect_problems(folder: str, find_problems: Callable[[], list[Problem]]) -> list[Problem]:
    """Result of `find_problems`. An OSError becomes a problem, to be raised on all ranks."""
    try:
        return find_problems()
    except OSError as error:
        return [
            Problem("unreadable", folder, None, f"cannot be read: {error}", "repair the storage or its permissions")
        ]


def _notes(fit_result: Fit, spec: LanguageModelSpec) -> Iterator[str]:
    if spec.upcycle is not None and spec.moe is not None:
        experts, experts_per_token = spec.moe.num_experts, spec.moe.experts_per_token
        layers = f"{len(spec.moe_layers)} of its {spec.num_layers} feed-forward layers"
        yield f"{layers} become {experts} experts each, {experts_per_token} per token"
    by_part = {"multi-token-prediction heads": fit_result.mtp_tensors, "other parts": fit_result.other_tensors}
    for part, names in by_part.items():
        if names:
            yield f"{len(names)} tensors of {part} (such as {names[0]}) are not trained; exports copy them unchanged"


class MixtureInit:
    """Initialization of the parts of a mixture that its dense folder lacks.

    Draws are keyed by (seed, name, element): every layout starts with the same model.
    """

    def __init__(self, spec: LanguageModelSpec, seed: int) -> None:
        assert spec.upcycle is not None
        self._spec, self._upcycle, self._seed = spec, spec.upcycle, seed
        self._table = {parameter.name: parameter for parameter in spec.parameters()}

    def finish(self, name: str, local: Tensor, origin: Sequence[int]) -> None:
        """Complete a rectangle of a parameter or buffer, which starts at `origin`, after it was loaded from the
        folder."""
        if name.endswith(".router"):
            self._draw_router(name, local, origin)
        elif is_new_in_mixture(self._spec, name):
            local.zero_()
        elif self._upcycle.noise and ".experts." in name:
            self._add_noise(name, local, origin)

    def _draw_router(self, name: str, local: Tensor, origin: Sequence[int]) -> None:
        """Draw a router `[M, N]` with a column per virtual group, and repeat each column for all experts of its group.

        Experts of a group are consecutive, and ties go to the lower expert: a token takes whole groups even if two of
        them tie.
        """
        std = self._table[name].std
        assert std is not None
        (first, column), num_groups = origin, self._upcycle.num_experts
        group_columns = local.new_empty(local.shape[0], num_groups)
        init_uniform_(group_columns, std, self._seed, name, (self._spec.model_dim, num_groups), (first, 0))
        expert_columns = group_columns.repeat_interleave(self._upcycle.routed_slices, dim=1)
        local.copy_(expert_columns[:, column : column + local.shape[1]])

    def _add_noise(self, name: str, local: Tensor, origin: Sequence[int]) -> None:
        for block, first in _blocks(local, origin):
            draws = block.new_empty(block.shape)
            init_uniform_(draws, self._upcycle.noise, self._seed, f"{name}.noise", self._table[name].shape, first)
            block.mul_(draws.add_(1))


def _blocks(local: Tensor, origin: Sequence[int]) -> Iterator[tuple[Tensor, tuple[int, int, int]]]:
    """Yield blocks of rows of single experts of `[E, rows, columns]`, with the start of each."""
    experts, rows, columns = origin
    step = max(1, BLOCK_ELEMENTS // max(1, local.shape[2]))
    for expert in range(local.shape[0]):
        for row in range(0, local.shape[1], step):
            yield local[expert : expert + 1, row : row + step], (experts + expert, rows + row, columns)

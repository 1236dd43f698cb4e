"""Weights of a folder into a model that is placed: each rank reads what is its own part, and nothing is loaded by
halves."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor, nn

from moe.interchange.beginning import Beginning
from moe.interchange.catalog import Catalog, catalog
from moe.interchange.copying import BLOCK_ELEMENTS, fill_ours
from moe.interchange.fitting import EMBEDDING, LM_HEAD, Fit, fit, wanted
from moe.interchange.hub_folder import HubFolder
from moe.interchange.pieces import Piece
from moe.interchange.seals import faults
from moe.interchange.stored import Stored
from moe.parallel import Coding, Layout, codings_of, extent, local_parameters, part_of, together
from moe.parallel.coded import blocks, coded, put
from moe.spec import LanguageModelSpec, Problem, SpecError
from moe.spec.form import SCALES
from moe.spec.parameter import Slices

_AGAIN = "get the file again from where the model came from"


@dataclass(frozen=True)
class Loaded:
    """Outcome of a load."""

    num_tensors: int
    """Of theirs, on this rank."""
    notes: tuple[str, ...]
    """For the user."""


@dataclass(frozen=True)
class _Part:
    """This rank's part of a tensor of ours, or of the codes or scales that it is kept as."""

    name: str
    local: Tensor
    origin: tuple[int, ...]
    coding: Coding | None = None
    of_scales: bool = False

    @property
    def values(self) -> Slices:
        """The rectangle of the tensor that it is made of."""
        within = tuple((low, low + size) for low, size in zip(self.origin, self.local.shape, strict=True))
        return within if self.coding is None else self.coding.values_of(within, of_scales=self.of_scales)


def load_weights(
    folder: str,
    model: nn.Module,
    spec: LanguageModelSpec,
    layout: Layout | None = None,
    *,
    roots: Sequence[str] | None = None,
    seed: int = 0,
) -> Loaded:
    """Fill this rank's parameters and buffers from a folder in the Hugging Face format; all ranks together.

    Everything that headers tell is checked before a weight is read, and told at once. What is converted on the way lies
    in memory a few megabytes at a time. Raises SpecError on every rank where it is raised on one: the model is then to
    be thrown away. `roots` are the folders that may be read, as `moe.data.locations` has them. What a mixture has and
    the dense folder that it is made of does not say is drawn by `seed`.
    """
    layout = layout or Layout.single()
    problems: tuple[Problem, ...] = ()
    try:
        found = catalog(HubFolder(folder, roots))
        fitted = fit(spec, found)
        parts = list(_parts(model, spec, layout))
    except SpecError as error:
        problems = error.problems
    agree(problems)
    reader, stored = _Reader(found), Stored(found.held, found.files)
    beginning = None if spec.upcycle is None else Beginning(spec, seed)
    try:
        agree(each_told(folder, lambda: faults(found, stored, together.rank(), together.world_size())))

        def fill() -> list[Problem]:
            for coding, alike in _made_together(parts):
                part, pieces = alike[0], fitted.pieces.get(alike[0].name, ())
                if coding is None:
                    fill_ours(part.local, part.origin, pieces, stored.read, reader.check)
                else:
                    _fill_coded(alike, coding, pieces, stored, reader)
                if beginning is not None:
                    beginning.finish(part.name, part.local, part.origin)
                if fitted.tied_twice and part.name == "embedding.weight":
                    reader.problems += _tied(found, stored, part)
            return reader.problems

        with torch.no_grad():
            agree(each_told(folder, fill))
    finally:
        stored.close()
    return Loaded(len(reader.read), (*found.described.notes, *_notes(fitted, spec)))


def _parts(model: nn.Module, spec: LanguageModelSpec, layout: Layout) -> Iterator[_Part]:
    """Local parts of a model, with their place in the whole."""
    shapes, codings = {each.name: each.shape for each in wanted(spec)}, codings_of(model)
    for each in local_parameters(model):
        of_scales = (name := each.name.removesuffix(SCALES)) in codings and name != each.name
        coding = codings.get(name)
        if name not in shapes:
            continue
        within = extent(each.part, layout)
        is_whole = coding is not None or tuple(each.part.shape) == shapes[name]
        assert is_whole, f"{each.name} is not as its spec says"
        assert tuple(end - first for first, end in within) == tuple(each.local.shape), each.name
        origin = tuple(first for first, _ in within)
        yield _Part(name, each.local.detach(), origin, coding, of_scales)
    for name, buffer in model.named_buffers():
        if name in shapes:
            yield _Part(name, buffer.detach(), tuple(first for first, _ in extent(part_of(buffer), layout)))


def _made_together(parts: Sequence[_Part]) -> Iterator[tuple[Coding | None, list[_Part]]]:
    """Codes and scales that are made of the same rectangle of a tensor; other parts one by one."""
    found: dict[object, list[_Part]] = {}
    for at, part in enumerate(parts):
        key = at if part.coding is None else (part.name, part.values)
        found.setdefault(key, []).append(part)
    for alike in found.values():
        yield alike[0].coding, alike


def _fill_coded(
    parts: Sequence[_Part], coding: Coding, pieces: Sequence[Piece], stored: Stored, reader: "_Reader"
) -> None:
    """Fill codes and scales of one rectangle of a tensor, of which a bounded block at a time is there in float32."""
    for block in blocks(parts[0].values, coding.dim, "cpu", _order_of_reading(pieces[0])):
        first = [low for low, _ in block]
        values = torch.empty([end - low for low, end in block])
        fill_ours(values, first, pieces, stored.read, reader.check)
        made = coded(values, coding)
        for part in parts:
            tensor = made[part.of_scales]
            assert tensor is not None
            put(tensor, coding.codes_of(block, of_scales=part.of_scales), part.local, part.origin)


def _order_of_reading(piece: Piece) -> list[int]:
    """Our dimensions as they follow in the files: a block that is short in the first ones lies in few rows there."""
    places = {dim: (len(piece.theirs.shape), 0) for dim in range(len(piece.ours.shape))}
    for axis, (dim, _) in piece.ours.steps.items():
        there, step = piece.theirs.steps.get(axis, (-1, 0))
        places[dim] = min(places[dim], (there, -step))
    return sorted(places, key=places.__getitem__)


class _Reader:
    """Record of the tensors that were read, and of the faults in them."""

    def __init__(self, found: Catalog) -> None:
        self._found = found
        self.read: Counter[str] = Counter()
        self.problems: list[Problem] = []

    def check(self, name: str, block: Tensor) -> None:
        """Note a tensor with values that are no numbers, once."""
        self.read[name] += 1
        # Both ends are NaN where any is: a hundred times as quick as a look at each.
        if block.numel() == 0 or all(isfinite(float(end)) for end in torch.aminmax(block)):
            return
        problem = self._found.problem(
            "not_finite", name, "holds values that are infinite or no numbers", _AGAIN
        )
        if problem not in self.problems:
            self.problems.append(problem)


def _tied(found: Catalog, stored: Stored, part: _Part) -> Iterator[Problem]:
    """Whether the logits' weights are another tensor than the embedding, where config.json says that they are one."""
    rows, width = part.local.shape
    first, column = part.origin
    for begin in range(first, first + rows, step := max(1, BLOCK_ELEMENTS // max(1, width))):
        within = ((begin, min(begin + step, first + rows)), (column, column + width))
        if not torch.equal(stored.read(LM_HEAD, within), stored.read(EMBEDDING, within)):
            yield found.problem("mismatch", LM_HEAD,
                                f"must be {EMBEDDING}, as tie_word_embeddings says, and is another",
                                "write `tie_embeddings: false` beside `from`, which keeps both")  # fmt: skip
            return


def each_told(folder: str, look: Callable[[], list[Problem]]) -> list[Problem]:
    """Problems that `look` finds; a file that cannot be read is one, too, of which the other ranks have to hear of."""
    try:
        return look()
    except OSError as error:
        return [
            Problem(
                "unreadable", folder, None, f"cannot be read: {error}", "mend the storage, or its permissions"
            )
        ]


def agree(problems: Sequence[Problem]) -> None:
    """Raise what any rank has found, on every rank."""
    told = together.all_gathered([each.to_dict() for each in problems])
    found = {str(problem): problem for each in told for entry in each for problem in [Problem(**entry)]}
    if found:
        raise SpecError(found.values())


def _notes(fitted: Fit, spec: LanguageModelSpec) -> Iterator[str]:
    if spec.upcycle is not None and spec.moe is not None:
        experts, taken = spec.moe.num_experts, spec.moe.experts_per_token
        layers = f"{len(spec.moe_layers)} of its {spec.num_layers} feed-forward layers"
        yield f"{layers} become {experts} experts each, of which a token takes {taken}"
    if fitted.untrained:
        first = fitted.untrained[0]
        yield (
            f"{len(fitted.untrained)} tensors of heads that predict further tokens ({first} and others) are not "
            "trained: an export has them unchanged"
        )

"""Values of a mixture's tensors that its dense folder does not say: routers, gates of shared experts, and noise."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from moe.interchange.copying import BLOCK_ELEMENTS
from moe.interchange.upcycled import begins_anew
from moe.random import init_uniform_
from moe.spec import LanguageModelSpec


class Beginning:
    """Beginning of a mixture, beside what its folder gives it.

    Draws are keyed by (seed, name, element): any layout begins with the same model.
    """

    def __init__(self, spec: LanguageModelSpec, seed: int) -> None:
        assert spec.upcycle is not None
        self._spec, self._upcycle, self._seed = spec, spec.upcycle, seed
        self._table = {parameter.name: parameter for parameter in spec.parameters()}

    def finish(self, name: str, local: Tensor, origin: Sequence[int]) -> None:
        """Change a rectangle of a parameter or buffer, which begins at `origin`, once it has what the folder gives
        it."""
        if name.endswith(".router"):
            self._draw_router(name, local, origin)
        elif begins_anew(self._spec, name):
            local.zero_()
        elif self._upcycle.noise and ".experts." in name:
            self._add_noise(name, local, origin)

    def _draw_router(self, name: str, local: Tensor, origin: Sequence[int]) -> None:
        """Draw as of a new router `[M, N]`, a column for each virtual group, which all of its experts have.

        Of equal logits the lower expert's is taken first, and experts of a group stand side by side: a token takes
        groups whole also where two of them tie.
        """
        std = self._table[name].std
        assert std is not None
        (first, column), num_groups = origin, self._upcycle.num_experts
        of_groups = local.new_empty(local.shape[0], num_groups)
        init_uniform_(of_groups, std, self._seed, name, (self._spec.model_dim, num_groups), (first, 0))
        of_experts = of_groups.repeat_interleave(self._upcycle.routed_slices, dim=1)
        local.copy_(of_experts[:, column : column + local.shape[1]])

    def _add_noise(self, name: str, local: Tensor, origin: Sequence[int]) -> None:
        for block, first in _blocks(local, origin):
            draws = block.new_empty(block.shape)
            init_uniform_(draws, self._upcycle.noise, self._seed, f"{name}.noise", self._table[name].shape, first)
            block.mul_(draws.add_(1))


def _blocks(local: Tensor, origin: Sequence[int]) -> Iterator[tuple[Tensor, tuple[int, int, int]]]:
    """Rows of single experts of `[E, rows, columns]`, with where each block begins."""
    experts, rows, columns = origin
    step = max(1, BLOCK_ELEMENTS // max(1, local.shape[2]))
    for expert in range(local.shape[0]):
        for row in range(0, local.shape[1], step):
            yield local[expert : expert + 1, row : row + step], (experts + expert, rows + row, columns)

"""The model and its loss as one plain module, as any user would write one: what `moe.sharding` plans."""

from functools import cache

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from moe.parallel import SequenceShard, declare
from moe.routing import TokenContext
from moe.spec import TranslationModelSpec
from moe.tasks.translation.batches import PairsBatch
from moe.tasks.translation.blocks import TranslationPass
from moe.tasks.translation.context import BatchContext
from moe.tasks.translation.loss import loss_of
from moe.tasks.translation.model import PAD, TranslationModel


class TranslationLoss(nn.Module):
    """Mean loss of the target tokens of a global batch. Whoever takes its gradient also takes that of the auxiliary
    losses of experts."""

    def __init__(self, model: TranslationModel, smoothing: float = 0.1, seed: int = 0) -> None:
        super().__init__()
        _let_blocks_be_given()
        self.model, self.smoothing, self.seed = model, smoothing, seed

    @classmethod
    def on_meta(
        cls,
        spec: TranslationModelSpec,
        smoothing: float = 0.1,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> "TranslationLoss":
        """That of a model without weights, on the meta device."""
        with torch.device("meta"):
            model = TranslationModel(spec, dtype)
            declare(model, spec.parameters(), torch.promote_types(dtype, torch.float32))
        return cls(model, smoothing, seed)

    def forward(self, source: Tensor, target_in: Tensor, target_out: Tensor, step: Tensor) -> Tensor:
        """A scalar, for `source` int64 `[B, L]`, `target_in` and the tokens after each of them `[B, N]`; `step` int64
        `[]` keys what is drawn."""
        context = BatchContext(step=step, seed=self.seed, training=self.training)
        objective = loss_of(
            self.model, PairsBatch(source, target_in, target_out, context), self.smoothing
        ).objective
        return objective / (target_out != PAD).sum()


@cache
def _let_blocks_be_given() -> None:
    """Blocks that repeat are captured once: the tensors of what each is given are arguments of its graph."""
    for kind in (TranslationPass, TokenContext, SequenceShard):
        pytree.register_dataclass(kind)

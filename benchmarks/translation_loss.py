"""Translation model and loss as one plain module, the way a user would write it, for `moe.sharding`."""

from functools import cache

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from moe.layers.attention_mask import AttentionMask
from moe.layers.sequence import PassRows, SequencePass
from moe.parallel import SequenceShard, declare
from moe.routing import TokenContext
from moe.spec import TranslationModelSpec
from moe.tasks.batch_context import BatchContext
from moe.tasks.translation.batches import PairsBatch
from moe.tasks.translation.model import PAD, TranslationModel, batch_loss


class TranslationLoss(nn.Module):
    """Mean loss per target token of a global batch. Backpropagating through it includes the auxiliary losses."""

    def __init__(self, model: TranslationModel, smoothing: float = 0.1, seed: int = 0) -> None:
        super().__init__()
        _register_pass_inputs()
        self.model, self.smoothing, self.seed = model, smoothing, seed

    @classmethod
    def on_meta(
        cls, spec: TranslationModelSpec, smoothing: float = 0.1, seed: int = 0, dtype: torch.dtype = torch.float32
    ) -> "TranslationLoss":
        """Loss of a model without weights, on the meta device."""
        with torch.device("meta"):
            model = TranslationModel(spec, dtype)
            declare(model, spec.parameters(), torch.promote_types(dtype, torch.float32))
        return cls(model, smoothing, seed)

    def forward(self, source: Tensor, target_in: Tensor, target_out: Tensor, step: Tensor) -> Tensor:
        """Scalar loss for `source` int64 `[B, L]`, `target_in` and its next tokens `target_out`, `[B, N]`.

        `step` int64 `[]` keys the random draws.
        """
        context = BatchContext(step=step, seed=self.seed, training=self.training)
        objective = batch_loss(self.model, PairsBatch(source, target_in, target_out, context), self.smoothing).objective
        return objective / (target_out != PAD).sum()


@cache
def _register_pass_inputs() -> None:
    """Register block inputs as pytrees: repeated blocks are captured once, with tensors as graph inputs."""
    for kind in (SequencePass, PassRows, AttentionMask, TokenContext, SequenceShard):
        pytree.register_dataclass(kind)

"""Loss of a micro-batch of pairs: label-smoothed cross-entropy of its target tokens."""

from moe.layers.nll import smoothed_nll
from moe.tasks.task import Loss
from moe.tasks.translation.batches import PairsBatch
from moe.tasks.translation.model import PAD, TranslationModel


def loss_of(model: TranslationModel, batch: PairsBatch, smoothing: float) -> Loss:
    """Sums over the target tokens of which this rank has the share: smoothed, and as they are."""
    hidden_states = model.hidden_states(batch.source, batch.target_in, batch.context)
    return Loss(
        *smoothed_nll(hidden_states, model.output_embedding, model.share(batch.target_out), smoothing, PAD)
    )

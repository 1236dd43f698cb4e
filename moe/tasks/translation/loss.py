"""Label-smoothed cross-entropy of a micro-batch's target tokens."""

from moe.layers.nll import smoothed_nll
from moe.tasks.task import Loss
from moe.tasks.translation.batches import PairsBatch
from moe.tasks.translation.model import PAD, TranslationModel


def loss_of(model: TranslationModel, batch: PairsBatch, smoothing: float) -> Loss:
    """Label-smoothed and plain NLL, summed over this rank's shard of target tokens."""
    hidden_states = model.hidden_states(batch.source, batch.target_in, batch.context)
    return Loss(*smoothed_nll(hidden_states, model.output_embedding, model.share(batch.target_out), smoothing, PAD))

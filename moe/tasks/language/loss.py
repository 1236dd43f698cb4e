"""Next-token cross-entropy of a micro-batch of sequences."""

from moe.layers.nll import smoothed_nll
from moe.tasks.language.batches import NOTHING, SequencesBatch
from moe.tasks.language.model import LanguageModel
from moe.tasks.task import Loss


def loss_of(model: LanguageModel, batch: SequencesBatch, smoothing: float = 0.0) -> Loss:
    """Label-smoothed and plain NLL, summed over this rank's target tokens."""
    hidden_states = model.hidden_states(batch.tokens, batch.context)
    return Loss(*smoothed_nll(hidden_states, model.output_embedding, model.share(batch.labels), smoothing, NOTHING))

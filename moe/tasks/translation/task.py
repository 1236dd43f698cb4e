"""Translation task. Loads no torch until a model is built."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from moe.data.pairs import check
from moe.data.progress import ProgressCallback
from moe.records import HeldOutResult, TranslationReport
from moe.spec import CatalogsSpec, JobSpec, ModelSpec, PairsSpec, TranslationModelSpec
from moe.tasks.task import Loss, RankBatch, Task

if TYPE_CHECKING:
    import torch
    from torch import nn

    from moe.data.pairs import PreparedPairs
    from moe.parallel import Layout
    from moe.plan import Plan
    from moe.tasks.translation.batches import PairsBatch
    from moe.tasks.translation.model import TranslationModel
    from moe.tasks.translation.translator import Translator


class TranslationTask(Task["PreparedPairs", "PairsBatch"]):
    """Translation with an encoder-decoder model, trained on sentence pairs."""

    def __init__(self, spec: JobSpec) -> None:
        super().__init__(spec)
        assert isinstance(spec.model, TranslationModelSpec)
        assert isinstance(spec.data, PairsSpec)
        self._model, self._data = spec.model, spec.data

    def check_data(self, roots: Sequence[str]) -> Sequence[str]:
        if isinstance(self._data, CatalogsSpec):
            _check_catalogs(self._data)
        else:
            check(self._data, roots)
        return ()

    def prepare(
        self,
        cache: str | Path,
        *,
        roots: Sequence[str] | None = None,
        report: Callable[[str], None] | None = None,
        read_checkpoint_files: Callable[[], Mapping[str, bytes]] | None = None,
        progress: ProgressCallback | None = None,
    ) -> "PreparedPairs":
        from moe.data.pairs import prepare  # also loads tokenizers, which the control plane does not need

        return prepare(self._data, self._model, cache, roots=roots, report=report, progress=progress)

    @classmethod
    def model_of(
        cls,
        spec: ModelSpec,
        layout: "Layout | None",
        *,
        seed: int,
        dtype: "torch.dtype | None",
        freeze: Sequence[str] = (),
    ) -> "TranslationModel":
        from moe.tasks.translation.model import build_model

        assert isinstance(spec, TranslationModelSpec)
        return build_model(spec, layout, seed=seed, dtype=dtype, freeze=freeze)

    @classmethod
    def generator(cls, model: "nn.Module", max_tokens: int, read: Callable[[str], bytes]) -> "Translator":
        from moe.tasks.translation.translator import Translator

        return Translator.from_files(model, max_tokens, read)

    def batches(
        self, data: "PreparedPairs", plan: "Plan", layout: "Layout"
    ) -> Callable[[int], RankBatch["PairsBatch"]]:
        from moe.tasks.translation.batches import PairsBatches

        return PairsBatches(data.train, self.spec, plan, layout)

    def dummy_batch(self, num_rows: int, num_tokens: int, layout: "Layout") -> "PairsBatch":
        from moe.tasks.translation.batches import PairsBatch

        smallest = min(self._model.source_vocab_size, self._model.target_vocab_size)
        return PairsBatch.dummy_batch(num_rows, num_tokens, smallest, layout)

    def loss(self, model: "nn.Module", micro_batch: "PairsBatch") -> Loss:
        from moe.tasks.translation.model import batch_loss

        return batch_loss(_translating(model), micro_batch, self.spec.label_smoothing)

    def measure_held_out(self, model: "nn.Module", layout: "Layout", data: "PreparedPairs") -> HeldOutResult:
        from moe.tasks.translation.evaluate import measure_held_out

        return measure_held_out(_translating(model), layout, data, self.spec.train.evaluation)

    def evaluate(self, model: "nn.Module", layout: "Layout", data: "PreparedPairs") -> TranslationReport:
        from moe.tasks.translation.evaluate import evaluate

        return evaluate(_translating(model), layout, data, self.spec)


def _translating(model: "nn.Module") -> "TranslationModel":
    from moe.tasks.translation.model import TranslationModel

    assert isinstance(model, TranslationModel)
    return model


@lru_cache(maxsize=256)
def _check_catalogs(data: CatalogsSpec) -> None:
    """Once per spec: slow, and constant while the process runs."""
    check(data, roots=())

"""Language modeling task: next-token prediction. Loads no torch until a model is built."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from moe.data.progress import ProgressCallback
from moe.data.sequences import check
from moe.data.sequences.model_tokenizer import SHARDS
from moe.records import HeldOutResult, LanguageReport, Sample
from moe.spec import (
    JobSpec,
    LanguageModelSpec,
    ModelSpec,
    PackagesSpec,
    PreferenceSpec,
    SequencesSpec,
    SpecError,
    UnpairedPreferenceSpec,
    stream_of,
)
from moe.tasks.language.pretrained import (
    base_digest,
    check_trained_adapter,
    model_tokenizer,
    tokenizer_of_checkpoint,
    with_template,
)
from moe.tasks.language.prompts import evaluation_prompts
from moe.tasks.task import Loss, RankBatch, Task

if TYPE_CHECKING:
    import torch
    from torch import nn

    from moe.data.sequences import PreparedSequences
    from moe.parallel import Layout
    from moe.plan import Plan
    from moe.tasks.language.batches import SequencesBatch
    from moe.tasks.language.generator import LanguageGenerator
    from moe.tasks.language.model import LanguageModel


class LanguageTask(Task["PreparedSequences", "SequencesBatch"]):
    """Next-token prediction with a decoder-only model, or a preference loss."""

    def __init__(self, spec: JobSpec) -> None:
        super().__init__(spec)
        assert isinstance(spec.model, LanguageModelSpec)
        if spec.missing_texts is not None:
            raise SpecError(spec.missing_texts)
        assert isinstance(spec.data, SequencesSpec)
        self._model, self._data = spec.model, spec.data
        self._reference: LanguageModel | None = None
        """Frozen copy of the initial weights, for preference losses that train all weights."""

    def check_data(self, roots: Sequence[str]) -> Sequence[str]:
        if (missing := self.spec.missing_folder) is not None:
            raise SpecError(missing)
        tokenizer = None
        if self._model.from_folder is not None:
            tokenizer = with_template(model_tokenizer(self._model, roots), self._data, roots)
            check_trained_adapter(self._model, roots)
        if isinstance(self._data, PackagesSpec):
            _check_packages(self._data)
            return ()
        return check(self._data, roots, tokenizer)

    def prepare(
        self,
        cache: str | Path,
        *,
        roots: Sequence[str] | None = None,
        report: Callable[[str], None] | None = None,
        read_checkpoint_files: Callable[[], Mapping[str, bytes]] | None = None,
        progress: ProgressCallback | None = None,
    ) -> "PreparedSequences":
        from moe.data.sequences import prepare

        tokenizer, files = None, dict[str, bytes]()
        if read_checkpoint_files is not None and (self._model.from_folder is not None or self._is_stream):
            files = dict(read_checkpoint_files())
        if self._model.from_folder is not None:
            tokenizer = tokenizer_of_checkpoint(files)
            if tokenizer is None:
                digest = base_digest(self._model, roots, {}) if self._needs_base else None
                tokenizer = with_template(model_tokenizer(self._model, roots, digest), self._data, roots)
        data = prepare(
            self._data,
            self._model.vocab_size,
            cache,
            tokenizer=tokenizer,
            roots=roots,
            report=report,
            progress=progress,
            shards=files.get(SHARDS) if self._is_stream else None,
        )
        evaluation_prompts(self.spec, data)  # refuses prompts that are too long before training starts
        return data

    def begin(self, model: "nn.Module", layout: "Layout", roots: Sequence[str] | None) -> Sequence[str]:
        from moe.tasks.language.pretrained import load, unknown_family_notes

        if self._model.from_folder is None:
            return unknown_family_notes(self._model)
        return load(_decoder(model), self._model, layout, roots, self.spec.train.seed)

    def begin_trained(self, model: "nn.Module", layout: "Layout", roots: Sequence[str] | None) -> Sequence[str]:
        from moe.tasks.language.pretrained import load_trained_adapter

        return load_trained_adapter(_decoder(model), self._model, layout, roots)

    def begin_reference(self, layout: "Layout", roots: Sequence[str] | None) -> None:
        if not self.spec.has_frozen_reference:
            return
        import torch

        from moe.parallel import local_parameters, values_changed
        from moe.tasks.language.pretrained import load

        train = self.spec.train
        dtype = getattr(torch, train.dtype)
        self._reference = self.model_of(self._model, layout, seed=train.seed, dtype=dtype, freeze=("*",))
        if self._model.from_folder is not None:
            load(self._reference, self._model, layout, roots, train.seed)
        values_changed(local_parameters(self._reference))

    def check_base(self, files: Mapping[str, bytes], roots: Sequence[str] | None) -> None:
        if self._needs_base:
            base_digest(self._model, roots, files)

    @property
    def _is_stream(self) -> bool:
        """Whether the corpus is read while training."""
        return stream_of(self._data) is not None

    @property
    def _needs_base(self) -> bool:
        """Whether every attempt loads the folder's weights."""
        return self._model.keeps_frozen or self.spec.has_frozen_reference

    @classmethod
    def model_of(
        cls,
        spec: ModelSpec,
        layout: "Layout | None",
        *,
        seed: int,
        dtype: "torch.dtype | None",
        freeze: Sequence[str] = (),
    ) -> "LanguageModel":
        from moe.tasks.language.model import build_model

        assert isinstance(spec, LanguageModelSpec)
        return build_model(spec, layout, seed=seed, dtype=dtype, freeze=freeze)

    @classmethod
    def generator(cls, model: "nn.Module", max_tokens: int, read: Callable[[str], bytes]) -> "LanguageGenerator":
        from moe.tasks.language.generator import LanguageGenerator

        return LanguageGenerator.from_files(model, max_tokens, read)

    def batches(
        self, data: "PreparedSequences", plan: "Plan", layout: "Layout"
    ) -> Callable[[int], RankBatch["SequencesBatch"]]:
        if data.shards is not None:
            from moe.tasks.language.streamed_batches import StreamedSequencesBatches

            return StreamedSequencesBatches(data, self.spec, plan, layout)
        from moe.tasks.language.batches import SequencesBatches

        return SequencesBatches(data.train, self.spec, plan, layout)

    def dummy_batch(self, num_rows: int, num_tokens: int, layout: "Layout") -> "SequencesBatch":
        from moe.tasks.language.batches import SequencesBatch

        return SequencesBatch.dummy_batch(num_rows, num_tokens, self._model.vocab_size, layout)

    def with_estimates(
        self, model: "nn.Module", batch: RankBatch["SequencesBatch"], layout: "Layout"
    ) -> RankBatch["SequencesBatch"]:
        if not self.spec.estimates_kl:
            return batch
        from moe.tasks.language.unpaired_preference import with_kl

        micro_batches = with_kl(_decoder(model), batch.micro_batches, self.spec, layout, self._reference)
        return replace(batch, micro_batches=micro_batches)

    def derived_numbers(self, numbers: Mapping[str, float | None]) -> Mapping[str, float | None]:
        desirable, undesirable = numbers.get("reward_desirable"), numbers.get("reward_undesirable")
        if desirable is None or undesirable is None:
            return numbers
        return {**numbers, "reward_margin": desirable - undesirable}

    def loss(self, model: "nn.Module", micro_batch: "SequencesBatch") -> Loss:
        if isinstance(self._data, UnpairedPreferenceSpec):
            from moe.tasks.language.unpaired_preference import unpaired_preference_loss_of

            return unpaired_preference_loss_of(_decoder(model), micro_batch, self.spec, self._reference)
        if isinstance(self._data, PreferenceSpec):
            from moe.tasks.language.preference import preference_loss_of

            return preference_loss_of(_decoder(model), micro_batch, self.spec, self._reference)
        from moe.tasks.language.model import batch_loss

        return batch_loss(_decoder(model), micro_batch, self.spec.label_smoothing)

    def samples(self, model: "nn.Module", layout: "Layout", data: "PreparedSequences") -> tuple[Sample, ...]:
        from moe.tasks.language.evaluate import samples

        return samples(_decoder(model), layout, data, self.spec)

    def graph_inputs(self, micro_batch: "SequencesBatch", num_targets: int) -> tuple["SequencesBatch", "torch.Tensor"]:
        return micro_batch.graph_inputs(num_targets)

    def measure_held_out(self, model: "nn.Module", layout: "Layout", data: "PreparedSequences") -> HeldOutResult:
        from moe.tasks.language.evaluate import measure_held_out

        return measure_held_out(_decoder(model), layout, data, self.spec, self._reference)

    def evaluate(self, model: "nn.Module", layout: "Layout", data: "PreparedSequences") -> LanguageReport:
        from moe.tasks.language.evaluate import evaluate

        return evaluate(_decoder(model), layout, data, self.spec, self._reference)


@lru_cache(maxsize=256)
def _check_packages(data: PackagesSpec) -> None:
    """Once per spec: slow, and constant while the process runs."""
    check(data, roots=())


def _decoder(model: "nn.Module") -> "LanguageModel":
    from moe.tasks.language.model import LanguageModel

    assert isinstance(model, LanguageModel)
    return model

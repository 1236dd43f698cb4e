"""Interface between one kind of model and the code that trains, measures, exports and serves it. No torch."""

import collections.abc
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from moe.data.progress import ProgressCallback
from moe.records import Ending, HeldOutResult, JsonRecord, Sample
from moe.spec import JobSpec, ModelSpec, spec_error
from moe.spec.form import stored_tensors
from moe.spec.generation import GenerationSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from moe.parallel import Layout
    from moe.plan import Plan


class PreparedData(Protocol):
    """Prepared data, readable by every rank of a run."""

    @property
    def key(self) -> str:
        """Content hash: the same on every rank and throughout the run."""

    def tokenizer_files(self) -> dict[str, bytes]:
        """Tokenizer files by name; every checkpoint includes them."""

    def carried_files(self) -> dict[str, bytes]:
        """Further files for every checkpoint: what exporting a pretrained model needs."""


Data = TypeVar("Data", bound=PreparedData)
MicroBatch = TypeVar("MicroBatch")


@dataclass(frozen=True)
class RankBatch(Generic[MicroBatch]):
    """One rank's part of a step's global batch."""

    step: int
    """From 0."""
    micro_batches: Sequence[MicroBatch]
    """The same number on every rank; some may be empty."""
    num_targets: int
    """Predicted tokens in the global batch; divides its loss."""
    num_tokens: int
    """Tokens in the global batch without padding."""
    source_tokens: dict[str, int] | None = None
    """Tokens of a stream up to this batch, by source; None for prepared data."""


class StreamedBatches(ABC, Generic[MicroBatch]):
    """Batches of a stream, in step order: functions of seed and step, but found quickly only from a stored position.

    Methods are collective; `batch` is called by one other thread than the rest.
    """

    @abstractmethod
    def seek(self, step: int, position: Any) -> str | None:
        """Continue before `step`, at a position that `position` returned, or at the beginning (None); return a note for
        the user if the position is another stream's."""

    @abstractmethod
    def __call__(self, step: int) -> RankBatch[MicroBatch]:
        """This rank's batch of `step`. Raises SpecError on all ranks for faults of the user's files."""

    @abstractmethod
    def position(self, step: int) -> Any:
        """Position before `step`, the next step to train: a JSON value, the same on every rank."""

    @abstractmethod
    def close(self) -> None:
        """End background processes and remove temporary files."""


@dataclass(frozen=True)
class IndexerLoss:
    """Losses of a model's indexers, which their layers add in the backward pass."""

    divergence: "Tensor"
    """KL divergence, summed over this rank's tokens and the layers with an indexer."""
    num_layers: int
    """Layers with an indexer."""
    coefficient: float


@dataclass(frozen=True)
class Loss:
    """Loss sums over this rank's target tokens of one micro-batch: scalars, float32 or wider.

    Under sequence parallelism (`SequenceParallel`) each tensor and context rank predicts its own shard of the tokens;
    otherwise all predict the same tokens, which count once.
    """

    objective: "Tensor"
    """Sum to minimize, without the auxiliary losses, which layers add in the backward pass."""
    nll: "Tensor"
    """Negative log-likelihood, for reporting."""
    numbers: Mapping[str, "Tensor"] = field(default_factory=dict)
    """Further scalars to record, by name; the same on every rank."""
    means: Mapping[str, "Tensor"] = field(default_factory=dict)
    """Further means to record over the global batch, by name, always the same names: `[2]`, this rank's sum and count.
    """
    indexer: IndexerLoss | None = None


class Task(ABC, Generic[Data, MicroBatch]):
    """Interface of one kind of model to the trainer, driver, workers and control plane.

    Methods with a model or a layout are collective. A model is any `nn.Module` with parameters materialized by
    `moe.parallel.apply`; its MoE layers are found in it.
    """

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec

    @abstractmethod
    def check_data(self, roots: Sequence[str]) -> Sequence[str]:
        """Check the data as far as possible before launch; return warnings. Loads no torch.

        User files must lie under `roots` (folders or fsspec URLs). Raises SpecError for invalid data.
        """

    @abstractmethod
    def prepare(
        self,
        cache: str | Path,
        *,
        roots: Sequence[str] | None = None,
        report: Callable[[str], None] | None = None,
        read_checkpoint_files: Callable[[], Mapping[str, bytes]] | None = None,
        progress: ProgressCallback | None = None,
    ) -> Data:
        """Prepared data from the folder `cache`, built there if absent. Loads no torch.

        Several processes may call this at once. `report` receives decisions. `read_checkpoint_files` returns
        `tokenizer_files` and `carried_files` of this run's newest checkpoint, if any: a resumed run uses those
        instead of their source. Raises SpecError.
        """

    def build_model(self, layout: "Layout") -> "nn.Module":
        """This rank's part of the model under `layout`, with initial weights drawn from `train.seed`."""
        import torch

        train = self.spec.train
        dtype = getattr(torch, train.dtype)
        return self.model_of(self.spec.model, layout, seed=train.seed, dtype=dtype, freeze=train.freeze)

    def begin(self, model: "nn.Module", layout: "Layout", roots: Sequence[str] | None) -> Sequence[str]:
        """Load pretrained weights into a new run's model; return notes for the user.

        Resumed runs call it only for parameters `omitted_from_checkpoints`. User files must lie under `roots`. Raises
        SpecError on all ranks.
        """
        return ()

    def begin_trained(self, model: "nn.Module", layout: "Layout", roots: Sequence[str] | None) -> Sequence[str]:
        """Load pretrained adapter weights into a new run's model, after `begin`; return notes for the user.

        User files must lie under `roots`. Raises SpecError on all ranks.
        """
        return ()

    def begin_reference(self, layout: "Layout", roots: Sequence[str] | None) -> None:
        """Load the frozen model that the loss compares with, if there is one, for a new or a resumed run.

        User files must lie under `roots`. Raises SpecError on all ranks.
        """

    def check_base(self, files: Mapping[str, bytes], roots: Sequence[str] | None) -> None:
        """Raise SpecError if weights `omitted_from_checkpoints`, or those of a reference model, differ from those
        recorded in a checkpoint's files."""

    def omitted_from_checkpoints(self) -> frozenset[str]:
        """Names of frozen parameters that checkpoints omit: call `begin` before loading a checkpoint."""
        if not getattr(self.spec.model, "keeps_frozen", False):
            return frozenset()
        frozen_parameters = (parameter for parameter in self.spec.model.parameters() if parameter.frozen)
        return frozenset(tensor.name for parameter in frozen_parameters for tensor, _ in stored_tensors(parameter))

    @classmethod
    def model_of(
        cls,
        spec: ModelSpec,
        layout: "Layout | None",
        *,
        seed: int,
        dtype: "torch.dtype | None",
        freeze: Sequence[str] = (),
    ) -> "nn.Module":
        """Model without a job, for exported folders. Raises SpecError for kinds without export."""
        raise spec_error("unsupported", "model.kind", spec.kind, "cannot be built without a job", "load its checkpoint")

    @classmethod
    def generator(cls, model: "nn.Module", max_tokens: int, read: Callable[[str], bytes]) -> "Generator":
        """Generator for a trained model; `max_tokens` is the longest training text.

        `read` returns tokenizer files by name. Raises ValueError or FileNotFoundError for unreadable files, SpecError
        for kinds that generate nothing.
        """
        raise spec_error("unsupported", "model", None, "cannot generate", "load its weights with torch")

    @abstractmethod
    def batches(self, data: Data, plan: "Plan", layout: "Layout") -> "Callable[[int], RankBatch[MicroBatch]]":
        """Function from step (from 0) to this rank's batch on its device; depends on seed and step only."""

    @abstractmethod
    def dummy_batch(self, num_rows: int, num_tokens: int, layout: "Layout") -> MicroBatch:
        """Synthetic micro-batch, for measurements."""

    def with_estimates(
        self, model: "nn.Module", batch: RankBatch[MicroBatch], layout: "Layout"
    ) -> RankBatch[MicroBatch]:
        """The batch with what its loss needs to know of the global batch before any backward pass."""
        return batch

    def derived_numbers(self, numbers: Mapping[str, float | None]) -> Mapping[str, float | None]:
        """A step's further scalars with those that follow from them."""
        return numbers

    @abstractmethod
    def loss(self, model: "nn.Module", micro_batch: MicroBatch) -> Loss:
        """Forward pass and loss of one micro-batch."""

    def graph_inputs(self, micro_batch: MicroBatch, num_targets: int) -> "tuple[MicroBatch, Tensor]":
        """(`micro_batch`, `num_targets` as a scalar tensor) as inputs of a CUDA graph: of micro-batches with equal
        shapes, only the values of tensors differ. Raises SpecError for kinds of models without graphs."""
        kind = self.spec.model.kind
        raise spec_error("not_applicable", "train.cuda_graphs", True, f"does not apply to a {kind} model", "omit it")

    @abstractmethod
    def measure_held_out(self, model: "nn.Module", layout: "Layout", data: Data) -> HeldOutResult:
        """Loss on a sample of each held-out set, to monitor a run; None for an empty set. The same on every rank."""

    def samples(self, model: "nn.Module", layout: "Layout", data: Data) -> tuple[Sample, ...]:
        """Completions of `train.evaluation.prompts`, the same on every rank."""
        return ()

    @abstractmethod
    def evaluate(self, model: "nn.Module", layout: "Layout", data: Data) -> JsonRecord:
        """Report of a finished run, the same on every rank."""


class Generator(ABC):
    """Inference with a trained model in one process: text in, text out."""

    @abstractmethod
    def generate(self, texts: Sequence[str], spec: GenerationSpec | None = None) -> list[str]:
        """Generate an output for each text; greedy decoding without `spec`.

        Raises SpecError for requests that this kind of model does not support.
        """

    @abstractmethod
    def stream(self, text: str, spec: GenerationSpec | None = None) -> collections.abc.Generator[str, None, Ending]:
        """Generate the output for one text in pieces, which join to what `generate` returns; return how it ended.

        Pieces may be empty, so that the consumer can stop at any token. Raises SpecError before the first piece.
        """

    def with_model_settings(self, spec: GenerationSpec) -> tuple[GenerationSpec, tuple[str, ...]]:
        """(spec with the model's own settings where it has none, settings that are not supported in words). Raises
        SpecError."""
        return spec.resolve(), ()

    def prepare_for_decoding(self) -> None:  # noqa: B027
        """Prepare the model for faster inference, with the same outputs. No training afterwards."""

    @abstractmethod
    def save_tokenizers(self, folder: Path) -> None:
        """Write the tokenizer files of an exported model."""

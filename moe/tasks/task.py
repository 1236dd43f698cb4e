"""Interface of a kind of model to whatever trains, measures, exports and uses models. Loads no torch."""

import collections.abc
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from moe.data.progress import Tell
from moe.records import Ending, HeldOutLosses, JsonRecord
from moe.spec import JobSpec, ModelSpec, Problem, SpecError
from moe.spec.form import kept
from moe.spec.generation import GenerationSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from moe.parallel import Layout
    from moe.plan import Plan


class PreparedData(Protocol):
    """Data that is ready to be read by every rank of a run."""

    @property
    def key(self) -> str:
        """Hash of everything that determines its content: the same on every rank, and throughout a run."""

    def tokenizer_files(self) -> dict[str, bytes]:
        """Tokenizer files by name, which every checkpoint carries."""

    def carried_files(self) -> dict[str, bytes]:
        """Further files that every checkpoint carries beside them: what an export of a given model will need."""


Data = TypeVar("Data", bound=PreparedData)
MicroBatch = TypeVar("MicroBatch")


@dataclass(frozen=True)
class RankBatch(Generic[MicroBatch]):
    """One rank's part of the global batch of a step, with the counts of the whole."""

    step: int
    """From 0."""
    micro_batches: Sequence[MicroBatch]
    """As many on every rank; some may be empty."""
    num_targets: int
    """Tokens of the global batch that are predicted, which its loss is divided by."""
    num_tokens: int
    """Real tokens of the global batch, without padding."""


@dataclass(frozen=True)
class Loss:
    """Sums over the tokens that this rank predicts of a micro-batch. Scalars of float32 at least.

    Tensor ranks predict their own shares of the tokens where the model shares them out (`SharesTokens`), else all of
    them the same, which are counted once.
    """

    objective: "Tensor"
    """The sum that training makes smaller. The auxiliary losses of experts enter the backward pass in their layers."""
    nll: "Tensor"
    """Negative log-likelihood, for people to read."""
    numbers: Mapping[str, "Tensor"] = field(default_factory=dict)
    """Further scalars to record with the step, by name; the same on every rank."""


class Task(ABC, Generic[Data, MicroBatch]):
    """Contract of a kind of model: the trainer, the driver, the workers and the control plane know nothing else of it.

    All ranks call methods that take a model or a layout together. A model is any `nn.Module` whose parameters were
    given out by `moe.parallel.apply`; its MoE layers are found in it.
    """

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec

    @abstractmethod
    def check_data(self, roots: Sequence[str]) -> Sequence[str]:
        """Warnings about the data, as far as it can be looked at before anything is launched. Raises SpecError for what
        is wrong with it.

        The user's files must lie under `roots` (folders or fsspec URLs). Loads no torch.
        """

    @abstractmethod
    def prepare(
        self,
        cache: str | Path,
        *,
        roots: Sequence[str] | None = None,
        report: Callable[[str], None] | None = None,
        read_checkpoint_files: Callable[[], Mapping[str, bytes]] | None = None,
        progress: Tell | None = None,
    ) -> Data:
        """The data, found in the folder `cache` or built there; several processes may call this at once.

        `report` is told decisions, `progress` how far it has come. `read_checkpoint_files` gives `tokenizer_files` and
        `carried_files` of the newest checkpoint of this very run, none where there is none: what a run took from
        elsewhere at first it has from there. Raises SpecError.
        Loads no torch.
        """

    @abstractmethod
    def build_model(self, layout: "Layout") -> "nn.Module":
        """The model with its initial weights, which `train.seed` decides: this rank's part under `layout`."""

    def begin(self, model: "nn.Module", layout: "Layout", roots: Sequence[str] | None) -> Sequence[str]:
        """Fill in what a new run begins with in place of initial weights; one that resumes does so only where some are
        `kept_elsewhere`. What users should be told of it.

        The user's files must lie under `roots`. Raises SpecError on all ranks.
        """
        return ()

    def begin_trained(
        self, model: "nn.Module", layout: "Layout", roots: Sequence[str] | None
    ) -> Sequence[str]:
        """Fill in what a new run goes on to train from where that was trained before, after `begin`; one that resumes
        has it in its checkpoint. What users should be told of it.

        The user's files must lie under `roots`. Raises SpecError on all ranks.
        """
        return ()

    def check_base(self, files: Mapping[str, bytes], roots: Sequence[str] | None) -> None:
        """Raise SpecError where what is `kept_elsewhere` is no longer what the tokenizers' files of a checkpoint tell
        of."""

    def kept_elsewhere(self) -> frozenset[str]:
        """Names of the parameters that never change and lie where `begin` finds them: checkpoints do without, and
        whoever loads one calls `begin` first."""
        if not getattr(self.spec.model, "keeps_frozen", False):
            return frozenset()
        frozen_parameters = (parameter for parameter in self.spec.model.parameters() if parameter.frozen)
        return frozenset(tensor.name for parameter in frozen_parameters for tensor, _ in kept(parameter))

    @classmethod
    def model_of(
        cls, spec: ModelSpec, layout: "Layout | None", *, seed: int, dtype: "torch.dtype | None"
    ) -> "nn.Module":
        """The model of its own spec alone, as an exported folder has it. A kind that is not exported has none."""
        raise SpecError(
            Problem(
                "unsupported", "model.kind", spec.kind, "is not built without a job", "load its checkpoint"
            )
        )

    @classmethod
    def generator(cls, model: "nn.Module", max_tokens: int, read: Callable[[str], bytes]) -> "Generator":
        """A trained model put to use, which was trained on texts of at most `max_tokens` tokens.

        `read` gives the tokenizers' files by name. Raises ValueError or FileNotFoundError for what cannot be read. A
        kind that generates nothing has none.
        """
        raise SpecError(
            Problem("unsupported", "model", None, "generates nothing", "load its weights with torch alone")
        )

    @abstractmethod
    def batches(self, data: Data, plan: "Plan", layout: "Layout") -> "Callable[[int], RankBatch[MicroBatch]]":
        """Source of this rank's batch of any step (from 0), on the mesh's device: a function of seed and step."""

    @abstractmethod
    def dummy_batch(self, num_rows: int, num_tokens: int, layout: "Layout") -> MicroBatch:
        """A micro-batch of made-up rows of so many tokens, to measure with."""

    @abstractmethod
    def loss(self, model: "nn.Module", micro_batch: MicroBatch) -> Loss:
        """The forward pass: the one place that says what is computed of a micro-batch."""

    @abstractmethod
    def held_out_losses(self, model: "nn.Module", layout: "Layout", data: Data) -> HeldOutLosses:
        """Nats a token on a part of each held-out set, to follow a run by; None where a set is empty."""

    @abstractmethod
    def evaluate(self, model: "nn.Module", layout: "Layout", data: Data) -> JsonRecord:
        """The report of a finished run, the same on every rank."""


class Generator(ABC):
    """A trained model in use, in one process: text in, text out."""

    @abstractmethod
    def generate(self, texts: Sequence[str], spec: GenerationSpec | None = None) -> list[str]:
        """Generate an output for each text, as `spec` says; the likeliest tokens when left out. Raises SpecError for
        what this kind of model cannot be asked."""

    @abstractmethod
    def stream(
        self, text: str, spec: GenerationSpec | None = None
    ) -> collections.abc.Generator[str, None, Ending]:
        """The output for one text, in pieces as it is made, and at last how it ended; joined, the pieces are what
        `generate` gives. One may be empty: whoever iterates can break off where it is. Raises SpecError as `generate`
        does, before the first piece."""

    def lay_out_for_texts(self) -> None:  # noqa: B027
        """Lay the model out for texts alone, which are the same and made faster then: it must not be trained any
        more."""

    @abstractmethod
    def save_tokenizers(self, folder: Path) -> None:
        """Write the files that an exported model carries beside its weights."""

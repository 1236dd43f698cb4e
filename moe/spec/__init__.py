"""Job specs: `JobSpec` and its parts. Imports no torch."""

from moe.spec.adapter import AdapterSpec
from moe.spec.conversations import ChatSpec, ConversationsSpec, PreferenceSpec, UnpairedPreferenceSpec
from moe.spec.data import (
    CatalogsSpec,
    DataSpec,
    JsonlSpec,
    PairsSpec,
    ParallelTextSpec,
    SequencesSpec,
    StreamableSpec,
    SyntheticSpec,
    TextPair,
    stream_of,
)
from moe.spec.errors import PROBLEM_CODES, Problem, ProblemCode, SpecError, spec_error
from moe.spec.files import MAX_SPEC_BYTES, json_schema, parse_text, read_job
from moe.spec.job import JobSpec
from moe.spec.language import LanguageModelSpec
from moe.spec.model import ModelSpec, model_spec
from moe.spec.module import ModuleDataSpec, ModuleModelSpec
from moe.spec.moe import MoESpec
from moe.spec.optimizer import AdafactorSpec, AdamWSpec, MuonSpec, OptimizerSpec
from moe.spec.parallel import ParallelSpec
from moe.spec.resources import Backoff, CheckpointSpec, FailureKind, ResourcesSpec, RetrySpec
from moe.spec.sequences import DocumentsSpec, PackagesSpec, SourceSpec
from moe.spec.train import EvaluationSpec, ScheduleSpec, TrainSpec
from moe.spec.translation import TranslationModelSpec
from moe.spec.upcycle import UpcycleSpec

__all__ = [
    "AdafactorSpec", "AdamWSpec", "AdapterSpec", "Backoff", "CatalogsSpec", "ChatSpec", "CheckpointSpec",
    "ConversationsSpec", "DataSpec", "DocumentsSpec", "EvaluationSpec", "FailureKind", "JobSpec", "JsonlSpec",
    "LanguageModelSpec", "MAX_SPEC_BYTES", "MoESpec", "MuonSpec", "ModelSpec", "ModuleDataSpec", "ModuleModelSpec",
    "OptimizerSpec", "PackagesSpec", "PROBLEM_CODES", "PairsSpec", "ParallelSpec", "ParallelTextSpec",
    "PreferenceSpec", "Problem", "ProblemCode",
    "ResourcesSpec", "RetrySpec", "ScheduleSpec", "SequencesSpec", "SourceSpec", "SpecError", "StreamableSpec",
    "SyntheticSpec", "TextPair", "TrainSpec", "TranslationModelSpec", "UnpairedPreferenceSpec", "UpcycleSpec",
    "json_schema", "model_spec", "parse_text", "read_job", "spec_error", "stream_of",
]  # fmt: skip

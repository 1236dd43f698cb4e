"""What is wanted: `JobSpec` and its parts, frozen and validated. Loads no torch."""

from moe.spec.data import CatalogsSpec, DataSpec, JsonlSpec, ParallelTextSpec, TextPair
from moe.spec.errors import Problem, SpecError
from moe.spec.files import MAX_SPEC_BYTES, json_schema, parse_text, read_job
from moe.spec.job import JobSpec
from moe.spec.model import ModelSpec
from moe.spec.moe import MoESpec
from moe.spec.resources import CheckpointSpec, ParallelSpec, ResourcesSpec, RetrySpec
from moe.spec.train import AdafactorSpec, AdamWSpec, EvaluationSpec, OptimizerSpec, ScheduleSpec, TrainSpec

__all__ = [
    "MAX_SPEC_BYTES", "AdafactorSpec", "AdamWSpec", "CatalogsSpec", "CheckpointSpec", "DataSpec",
    "EvaluationSpec", "JobSpec", "JsonlSpec", "ModelSpec", "MoESpec", "OptimizerSpec", "ParallelSpec",
    "ParallelTextSpec", "Problem", "ResourcesSpec", "RetrySpec", "ScheduleSpec", "SpecError", "TextPair",
    "TrainSpec", "json_schema", "parse_text", "read_job",
]  # fmt: skip

"""Records that a run outputs: steps, checkpoints, reports. No torch: services and clients read them."""

from moe.records.checkpoint import CheckpointRecord, StoredCheckpoint
from moe.records.generation import Ending, Reason
from moe.records.json_record import JsonRecord
from moe.records.language import Completion, LanguageReport, SourceReport
from moe.records.module import ModuleReport
from moe.records.preparation import PreparationRecord
from moe.records.step import HeldOutLosses, LayerRecord, StepRecord
from moe.records.translation import Example, SetReport, SubsetReport, TranslationReport, TranslationScores

__all__ = [
    "CheckpointRecord",
    "Completion",
    "Ending",
    "Example",
    "HeldOutLosses",
    "JsonRecord",
    "LanguageReport",
    "LayerRecord",
    "ModuleReport",
    "PreparationRecord",
    "Reason",
    "TranslationScores",
    "SetReport",
    "SourceReport",
    "StepRecord",
    "StoredCheckpoint",
    "SubsetReport",
    "TranslationReport",
]

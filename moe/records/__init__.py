"""Records that a run outputs: steps, checkpoints, reports. No torch: services and clients read them."""

from moe.records.json_record import JsonRecord
from moe.records.language import Completion, Ending, LanguageReport, ModuleReport, Reason, ScoredToken, SourceReport
from moe.records.step import (
    CheckpointRecord,
    HeldOutLosses,
    HeldOutResult,
    LabelKind,
    LabelLayerRecord,
    LabelLoads,
    LayerRecord,
    PreparationRecord,
    Sample,
    StepRecord,
    StoredCheckpoint,
)
from moe.records.translation import Example, SetReport, SubsetReport, TranslationReport, TranslationScores

__all__ = [
    "CheckpointRecord", "Completion", "Ending", "Example", "HeldOutLosses", "HeldOutResult", "JsonRecord",
    "LabelKind", "LabelLayerRecord", "LabelLoads", "LanguageReport", "LayerRecord", "ModuleReport",
    "PreparationRecord", "Reason", "Sample", "ScoredToken", "SetReport", "SourceReport", "StepRecord",
    "StoredCheckpoint", "SubsetReport", "TranslationReport", "TranslationScores",
]  # fmt: skip

"""Values that a run hands on: steps, checkpoints, reports. No torch, so that services and clients read them too."""

from moe.records.checkpoint import CheckpointRecord
from moe.records.step import HeldOutLosses, LayerRecord, StepRecord

__all__ = ["CheckpointRecord", "HeldOutLosses", "LayerRecord", "StepRecord"]

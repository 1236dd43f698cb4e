"""A trained model from wherever it lies."""

import torch

from moe.export.model_folder import is_exported, load_exported
from moe.export.trained_model import TrainedModel


def load_trained(folder: str, device: torch.device | str = "cpu") -> TrainedModel:
    """The model of a checkpoint's folder (as `TrainedModel.load` takes it), or of an exported model's.

    Raises CheckpointError where the checkpoint is not committed or not whole, ExportError.
    """
    return load_exported(folder, device) if is_exported(folder) else TrainedModel.load(folder, device)

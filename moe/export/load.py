"""Loading of a trained model from a checkpoint or an exported folder."""

import torch

from moe.export.model_folder import is_exported, load_exported
from moe.export.trained_model import TrainedModel


def load_trained(folder: str, device: torch.device | str = "cpu") -> TrainedModel:
    """Load the model of a checkpoint's folder (see `TrainedModel.load`) or an exported folder.

    Raises CheckpointError if the checkpoint is uncommitted or damaged, ExportError.
    """
    return load_exported(folder, device) if is_exported(folder) else TrainedModel.load(folder, device)

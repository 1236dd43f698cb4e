"""Scores of a trained recommender on the one held-out import of each file: `python -m recommender.score CHECKPOINT`,
the folder of a checkpoint, which torch alone reads.

U files, I modules, T tasks, W other imports of a file.
"""

import sys
import warnings

import torch
from torch import Tensor
from torch.distributed import checkpoint

from recommender.data import Imports, imports
from recommender.model import Recommender, build

NUM_FILES = 500
"""Of all, drawn once: each is scored with every module."""
TOP = 10


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m recommender.score CHECKPOINT, a folder that `shardyard checkpoints JOB` tells")
    dataset, model = imports(), build().eval()
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # warns that it loads in one process
        checkpoint.load(tensors, checkpoint_id=sys.argv[1])
    files_U = torch.randperm(len(dataset.files), generator=torch.Generator().manual_seed(1))[:NUM_FILES]
    print(f"{len(dataset.files):,} files, {len(dataset.modules) - 1:,} modules, digest {dataset.digest}")
    results = {"the model": scores(model, dataset, files_U), "popularity": popularity(dataset, files_U)}
    for name, scores_UIT in results.items():
        recall, auc = ranking(scores_UIT[..., 0], dataset, files_U)
        error = squared_error(scores_UIT[..., 1], dataset, files_U)
        print(f"{name:10}  recall@{TOP} {recall:.3f}  AUC {auc:.3f}  squared error of names {error:.3f}")


@torch.no_grad()
def scores(model: Recommender, dataset: Imports, files_U: Tensor) -> Tensor:
    """Output [U, I, T] of a model for each file with each module."""
    modules_I, rows = torch.arange(len(dataset.modules)), []
    for file in files_U:
        others_IW = dataset.modules_UW[file].expand(len(modules_I), -1)
        rows.append(model.scores(file.expand_as(modules_I), others_IW, modules_I))
    return torch.stack(rows)


def popularity(dataset: Imports, files_U: Tensor) -> Tensor:
    """Number of files that import a module and the mean number of names from it, for each file alike: [U, I, T]."""
    modules = dataset.modules_UW.flatten()
    counts_I = torch.bincount(modules, minlength=len(dataset.modules)).float()
    names_I = torch.zeros_like(counts_I).scatter_add(0, modules, dataset.names_UW.flatten())
    return torch.stack([counts_I, names_I / counts_I.clamp(min=1)], 1).expand(len(files_U), -1, -1)


def ranking(scores_UI: Tensor, dataset: Imports, files_U: Tensor) -> tuple[float, float]:
    """(share of held-out modules among the first ten, area under the ROC curve) among modules that a file is not known
    to import."""
    others_UI = scores_UI.scatter(1, dataset.modules_UW[files_U], -torch.inf)
    others_UI[:, 0] = -torch.inf
    own_U1 = scores_UI.gather(1, dataset.held_out_U[files_U, None])
    num_level_U = (others_UI == own_U1).sum(1) - 1
    above_U = (others_UI > own_U1).sum(1) + num_level_U / 2
    num_others_U = (others_UI > -torch.inf).sum(1) - 1
    return (above_U < TOP).double().mean().item(), (1 - above_U / num_others_U).mean().item()


def squared_error(scores_UI: Tensor, dataset: Imports, files_U: Tensor) -> float:
    """Squared error of the number of names that a file imports from its held-out module."""
    own_U1 = scores_UI.gather(1, dataset.held_out_U[files_U, None])
    return (own_U1[:, 0] - dataset.held_out_names_U[files_U]).square().mean().item()


if __name__ == "__main__":
    main()

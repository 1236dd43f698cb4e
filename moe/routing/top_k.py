"""The k best of many, the same ones whoever asks."""

from torch import Tensor


def top_k(scores: Tensor, k: int) -> Tensor:
    """int64 `[..., k]`: where the k highest of the last dimension are, best first, ties to the lower index.

    torch's own leaves open which of equal entries it takes, and may take others for another number of rows.
    """
    several = min(k + 1, scores.shape[-1])
    best, index = scores.detach().topk(several, dim=-1)
    if bool((best[..., 1:] == best[..., :-1]).any()):
        index = scores.detach().sort(dim=-1, descending=True, stable=True).indices
    return index[..., :k]

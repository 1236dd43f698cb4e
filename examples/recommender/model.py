"""A recommender of two tasks: whether a user takes an item, and how much of it (multi-gate mixture of experts, MMoE: Ma
et al., KDD 2018). Plain torch, for one device.

B pairs of a user and an item, W other items of the user, M width of an embedding, D features of a pair, E experts, H
hidden units, T tasks.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from recommender.data import Batch, imports


class Recommender(nn.Module):
    def __init__(self, num_users: int, num_items: int, width: int, num_experts: int, hidden_dim: int) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)
        self.users = nn.Embedding(num_users, width)
        self.items = nn.Embedding(num_items, width)
        self.popularity = nn.Embedding(num_items, 1)
        self.w_in_EDH = nn.Parameter(torch.empty(num_experts, 5 * width, hidden_dim))
        self.w_out_EHM = nn.Parameter(torch.empty(num_experts, hidden_dim, width))
        self.gates_TDE = nn.Parameter(torch.empty(2, 5 * width, num_experts))
        self.towers_TM = nn.Parameter(torch.empty(2, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)
        nn.init.zeros_(self.popularity.weight)
        for weight, size in ((self.w_in_EDH, 1), (self.w_out_EHM, 1), (self.gates_TDE, 1), (self.towers_TM, 1)):
            nn.init.normal_(weight, std=weight.shape[size] ** -0.5)

    def scores(self, user_B: Tensor, others_BW: Tensor, item_B: Tensor) -> Tensor:
        """Output [B, T] for each pair: logit of whether the user takes the item, and how much of it."""
        user_BM, item_BM = self.dropout(self.users(user_B)), self.dropout(self.items(item_B))
        there_BW1 = (others_BW > 0).to(user_BM.dtype).unsqueeze(2)
        history_BM = (self.dropout(self.items(others_BW)) * there_BW1).sum(1) / there_BW1.sum(1).clamp(min=1)
        x_BD = torch.cat([user_BM, history_BM, item_BM, user_BM * item_BM, history_BM * item_BM], 1)

        hidden_BEH = torch.relu(torch.einsum("bd,edh->beh", x_BD, self.w_in_EDH))
        experts_BEM = torch.einsum("beh,ehm->bem", hidden_BEH, self.w_out_EHM)
        gates_BTE = torch.einsum("bd,tde->bte", x_BD, self.gates_TDE).softmax(2)
        tasks_BTM = torch.einsum("bte,bem->btm", gates_BTE, experts_BEM)
        scores_BT = (tasks_BTM * self.towers_TM).sum(2)
        return scores_BT + functional.pad(self.popularity(item_B), (0, 1))

    def forward(self, user_B: Tensor, others_BW: Tensor, item_B: Tensor, taken_B: Tensor, amount_B: Tensor) -> Tensor:
        """Loss: cross-entropy of the first task, and squared error of the second where the item is taken."""
        scores_BT = self.scores(user_B, others_BW, item_B)
        taken_B, amount_B = taken_B.to(scores_BT.dtype), amount_B.to(scores_BT.dtype)
        misses = functional.binary_cross_entropy_with_logits(scores_BT[:, 0], taken_B)
        errors_B = taken_B * (scores_BT[:, 1] - amount_B) ** 2
        return misses + 0.1 * errors_B.sum() / taken_B.sum()


def build(
    num_users: int = 65_536, width: int = 32, num_experts: int = 4, hidden_dim: int = 64, dtype: str = "float32"
) -> Recommender:
    """Recommender of modules to files, with room in its table for new files."""
    model = Recommender(num_users, len(imports().modules), width, num_experts, hidden_dim)
    return model.to(getattr(torch, dtype))


def build_large() -> Recommender:
    """Recommender for planning, with tables that no device has room for: 400 GB."""
    return Recommender(num_users=3_000_000_000, num_items=200_000_000, width=32, num_experts=16, hidden_dim=1024)


def sample_large() -> Batch:
    """Sample batch for it, whose values do not matter."""
    user_B, item_B = torch.zeros(2, 65_536, dtype=torch.int64)
    return (user_B, torch.zeros(65_536, 64, dtype=torch.int64), item_B, torch.zeros(65_536), torch.zeros(65_536))

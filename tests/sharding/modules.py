"""Modules that are no Transformer, written as their users write them: nothing in them knows of sharding."""

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    """Two convolutions around which the input goes, by a projection where it becomes smaller or has more channels."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.first_norm, self.second_norm = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.around = nn.Identity()
        if stride > 1 or channels_in != channels:
            self.around = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(hidden)) + self.around(x))


class ConvolutionalNetwork(nn.Module):
    """A residual network for pictures, with batch norm."""

    def __init__(self, channels: int = 4, num_classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.blocks = nn.Sequential(
            Residual(channels, channels, 1),
            Residual(channels, 2 * channels, 2),
            Residual(2 * channels, 2 * channels, 1),
        )
        self.head = nn.Linear(2 * channels, num_classes)

    def forward(self, pictures: Tensor, labels: Tensor) -> Tensor:
        x = self.blocks(self.pool(F.relu(self.norm(self.stem(pictures)))))
        x = torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)
        return F.cross_entropy(self.head(x), labels)


class Recommender(nn.Module):
    """Whether an item is clicked, and how long it is watched, of users and items with tags: a table of embeddings for
    each, and a mixture of experts with a gate by task (multi-gate mixture of experts)."""

    def __init__(self, num_users: int, num_items: int, num_tags: int, dim: int = 6, num_experts: int = 4) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(num_users, dim), nn.Embedding(num_items, dim)
        self.tags = nn.Embedding(num_tags, dim, padding_idx=0)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(3 * dim, 10), nn.ReLU(), nn.Linear(10, 8)) for _ in range(num_experts)
        )
        self.gates = nn.ModuleDict({task: nn.Linear(3 * dim, num_experts) for task in ("click", "watch")})
        self.towers = nn.ModuleDict({task: nn.Linear(8, 1) for task in ("click", "watch")})

    def forward(
        self, users: Tensor, items: Tensor, tags: Tensor, is_clicked: Tensor, watched_s: Tensor
    ) -> dict[str, Tensor]:
        there = (tags != 0).unsqueeze(-1)
        of_tags = (self.tags(tags) * there).sum(1) / there.sum(1).clamp(min=1)
        x = torch.cat([self.users(users), self.items(items), of_tags], dim=-1)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=1)
        found = {}
        for task, gate in self.gates.items():
            weights = torch.softmax(gate(x), dim=-1)
            mixed = torch.einsum("be,beh->bh", weights, outputs)
            found[task] = self.towers[task](mixed).squeeze(-1)
        loss = F.binary_cross_entropy_with_logits(found["click"], is_clicked)
        loss = loss + 0.1 * F.huber_loss(found["watch"], torch.log1p(watched_s))
        return {"loss": loss, **{task: each.detach() for task, each in found.items()}}


class UnevenPerceptron(nn.Module):
    """Layers none of whose sizes a number of ranks divides."""

    def __init__(self, sizes: tuple[int, ...] = (7, 13, 11, 5, 1)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.norm = nn.LayerNorm(sizes[1])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 0:
                x = self.norm(x)
            if number + 1 < len(self.layers):
                x = F.gelu(x)
        return F.mse_loss(x.squeeze(-1), y)


class RecurrentLanguageModel(nn.Module):
    """Torch's own recurrent layers over embeddings, with the embedding for the output too."""

    def __init__(self, kind: str, num_words: int = 19, dim: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_words, dim)
        self.layers = getattr(nn, kind)(dim, dim, num_layers=2, batch_first=True)
        self.output = nn.Linear(dim, num_words, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        hidden, _ = self.layers(self.embedding(words[:, :-1]))
        logits = self.output(hidden)
        return F.cross_entropy(logits.flatten(0, 1), words[:, 1:].reshape(-1))


class SelectiveStateSpace(nn.Module):
    """A layer whose state decays by as much as each position says (Mamba, arXiv 2312.00752), its recurrence scanned in
    log2(length) steps."""

    def __init__(self, dim: int = 5, inner: int = 6, num_states: int = 3, kernel: int = 4) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(dim), nn.Linear(dim, 2 * inner, bias=False)
        self.convolution = nn.Conv1d(inner, inner, kernel, groups=inner, padding=kernel - 1)
        self.of_input = nn.Linear(inner, 1 + 2 * num_states, bias=False)
        self.step = nn.Linear(1, inner)
        self.decay = nn.Parameter(torch.log(torch.arange(1, num_states + 1.0)).repeat(inner, 1))
        self.skip, self.output = nn.Parameter(torch.ones(inner)), nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden, gate = self.project(self.norm(x)).chunk(2, dim=-1)
        hidden = self.convolution(hidden.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        hidden = F.silu(hidden)
        num_states = self.decay.shape[1]
        step, into, out_of = self.of_input(hidden).split([1, num_states, num_states], dim=-1)
        step = F.softplus(self.step(step))
        decay = torch.exp(-step[..., None] * torch.exp(self.decay))
        state = scanned(decay, (step * hidden)[..., None] * into[:, :, None])
        y = (state @ out_of[..., None]).squeeze(-1) + self.skip * hidden
        return x + self.output(y * F.silu(gate))


def scanned(decay: Tensor, given: Tensor) -> Tensor:
    """`state[t] = decay[t] * state[t - 1] + given[t]` along dimension 1."""
    distance, length = 1, given.shape[1]
    while distance < length:
        behind = (0, 0) * (given.dim() - 2) + (distance, 0)
        before = F.pad(given, behind)[:, :length]
        given = given + decay * before
        decay = decay * F.pad(decay, behind, value=1.0)[:, :length]
        distance *= 2
    return given


class StateSpaceModel(nn.Module):
    """Such a layer, for series of which the next value is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 5), nn.Linear(5, 2)
        self.layer = SelectiveStateSpace()

    def forward(self, series: Tensor) -> tuple[Tensor, Tensor]:
        found = self.last(self.layer(self.first(series[:, :-1])))
        return F.smooth_l1_loss(found, series[:, 1:]), found

"""Modules that know nothing of sharding: small ones that many tests share, and networks other than Transformers."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MeanSquare(nn.Module):
    """Mean square of what layers return."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def perceptron(*widths: int) -> MeanSquare:
    """Linear layers with tanh between them: `layers.0`, `layers.2` and so on."""
    layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Tanh(), nn.Linear(*pair))]
    return MeanSquare(*layers[1:])


class Stack(nn.Module):
    """Repeated square layers, whose activations are larger than their parameters for large batches."""

    def __init__(self, width: int = 16, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def hidden_states(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden_states(x).square().mean()


class Function(nn.Module):
    """A function of parameters and then of the inputs."""

    def __init__(self, function: Callable[..., Any], *parameters: Tensor) -> None:
        super().__init__()
        self.function, self.operands = function, nn.ParameterList(parameters)

    def forward(self, *inputs: Any) -> Any:
        return self.function(*self.operands, *inputs)


def mean_square(y: Tensor) -> Tensor:
    return y.square().mean()


class Residual(nn.Module):
    """Two convolutions with a shortcut, which is a projection if stride or channels change."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.first_norm, self.second_norm = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.shortcut = nn.Identity()
        if stride > 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        hidden_states = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(hidden_states)) + self.shortcut(x))


class ConvolutionalNetwork(nn.Module):
    """A residual network for images, with batch norm."""

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

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.blocks(self.pool(F.relu(self.norm(self.stem(images)))))
        x = torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)
        return F.cross_entropy(self.head(x), labels)


class Recommender(nn.Module):
    """Multi-gate mixture of experts: predicts clicks and watching times from users, items and tags."""

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
        is_tag = (tags != 0).unsqueeze(-1)
        mean_tag = (self.tags(tags) * is_tag).sum(1) / is_tag.sum(1).clamp(min=1)
        x = torch.cat([self.users(users), self.items(items), mean_tag], dim=-1)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=1)
        results = {}
        for task, gate in self.gates.items():
            weights = torch.softmax(gate(x), dim=-1)
            mixture = torch.einsum("be,beh->bh", weights, outputs)
            results[task] = self.towers[task](mixture).squeeze(-1)
        loss = F.binary_cross_entropy_with_logits(results["click"], is_clicked)
        loss = loss + 0.1 * F.huber_loss(results["watch"], torch.log1p(watched_s))
        return {"loss": loss, **{task: result.detach() for task, result in results.items()}}


class UnevenPerceptron(nn.Module):
    """Layers with sizes that no number of ranks divides."""

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
    """Torch's recurrent layers over embeddings that are also the output weight."""

    def __init__(self, kind: str, num_words: int = 19, dim: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_words, dim)
        self.layers = getattr(nn, kind)(dim, dim, num_layers=2, batch_first=True)
        self.output = nn.Linear(dim, num_words, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        hidden_states, _ = self.layers(self.embedding(words[:, :-1]))
        logits = self.output(hidden_states)
        return F.cross_entropy(logits.flatten(0, 1), words[:, 1:].reshape(-1))


class SelectiveStateSpace(nn.Module):
    """Layer with input-dependent decay (Mamba, arXiv 2312.00752); its recurrence is a scan of log2(length) steps."""

    def __init__(self, dim: int = 5, inner: int = 6, num_states: int = 3, kernel: int = 4) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(dim), nn.Linear(dim, 2 * inner, bias=False)
        self.convolution = nn.Conv1d(inner, inner, kernel, groups=inner, padding=kernel - 1)
        self.selection = nn.Linear(inner, 1 + 2 * num_states, bias=False)
        self.step = nn.Linear(1, inner)
        self.decay = nn.Parameter(torch.log(torch.arange(1, num_states + 1.0)).repeat(inner, 1))
        self.skip, self.output = nn.Parameter(torch.ones(inner)), nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden_states, gate = self.project(self.norm(x)).chunk(2, dim=-1)
        hidden_states = self.convolution(hidden_states.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        hidden_states = F.silu(hidden_states)
        num_states = self.decay.shape[1]
        step, input_by, output_by = self.selection(hidden_states).split([1, num_states, num_states], dim=-1)
        step = F.softplus(self.step(step))
        decay = torch.exp(-step[..., None] * torch.exp(self.decay))
        state = scan(decay, (step * hidden_states)[..., None] * input_by[:, :, None])
        y = (state @ output_by[..., None]).squeeze(-1) + self.skip * hidden_states
        return x + self.output(y * F.silu(gate))


def scan(decay: Tensor, state: Tensor) -> Tensor:
    """`state[t] += decay[t] * state[t - 1]` along dimension 1."""
    distance, length = 1, state.shape[1]
    while distance < length:
        padding = (0, 0) * (state.dim() - 2) + (distance, 0)
        state = state + decay * F.pad(state, padding)[:, :length]
        decay = decay * F.pad(decay, padding, value=1.0)[:, :length]
        distance *= 2
    return state


class StateSpaceModel(nn.Module):
    """Predicts the next value of a series."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 5), nn.Linear(5, 2)
        self.layer = SelectiveStateSpace()

    def forward(self, series: Tensor) -> tuple[Tensor, Tensor]:
        prediction = self.last(self.layer(self.first(series[:, :-1])))
        return F.smooth_l1_loss(prediction, series[:, 1:]), prediction

"""A user's module, as jobs name it: `tests.service.users_module:build` and `:batch`; and modules that go wrong."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Ratings(nn.Module):
    """Rates lists of items. Its table and width have odd sizes, and its norm has buffers."""

    def __init__(self, width: int, dropout: float = 0.25) -> None:
        super().__init__()
        self.items = nn.Embedding(11, 8)
        self.inner = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(width, 1)

    def forward(self, items_BL: Tensor, rating_B: Tensor) -> Tensor:
        x = self.norm(torch.relu(self.inner(self.items(items_BL).mean(1))))
        return functional.mse_loss(self.out(self.dropout(x)).squeeze(1), rating_B)


class MeasuredRatings(Ratings):
    """Returns a further number with its loss, and a tensor of several."""

    def forward(self, items_BL: Tensor, rating_B: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        loss = super().forward(items_BL, rating_B)
        spread = (rating_B.max() - rating_B.min()).detach()
        return {"loss": loss, "spread": spread, "ratings": rating_B.detach() * 2}


def returns_numbers(width: int = 7) -> nn.Module:
    return MeasuredRatings(width).double()


def build(width: int = 7, dropout: float = 0.25) -> nn.Module:
    return Ratings(width, dropout).double()


def batch(seed: int, step: int, size: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + step)
    items_BL = torch.randint(11, (size, 5), generator=generator)
    return items_BL, items_BL.double().mean(1) / 11


def batch_by_name(seed: int, step: int) -> dict[str, Tensor]:
    items_BL, rating_B = batch(seed, step)
    return {"rating_B": rating_B, "items_BL": items_BL}


def sample() -> tuple[Tensor, Tensor]:
    return batch(0, 0)


def sleeps(note: str) -> nn.Module:
    """Sleep forever, as does a child in a session of its own; note both process ids."""
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    Path(note).write_text(f"{os.getpid()} {sleeper.pid}")
    time.sleep(600)
    return build()


def eats() -> nn.Module:
    return nn.ParameterList([torch.ones(1 << 28, device="cpu") for _ in range(1000)])  # type: ignore[return-value]


def raises() -> nn.Module:
    raise KeyError("no such layer")


def prints() -> nn.Module:
    print("{'plan': 'not this'}" * 10_000)
    return build()


def exits() -> nn.Module:
    print("giving up", flush=True)
    os._exit(3)


def gives_a_number() -> Any:
    return 3


def reads_values() -> nn.Module:
    """A module that cannot be captured as a graph."""

    class Reader(Ratings):
        def forward(self, items_BL: Tensor, rating_B: Tensor) -> Tensor:
            if rating_B.sum() > 0:
                return super().forward(items_BL, rating_B)
            return rating_B.sum()

    return Reader(7).double()

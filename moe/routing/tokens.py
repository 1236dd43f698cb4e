"""Token metadata for routing: positions, padding, step and seed."""

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class BatchCounts:
    """Counts of the global batch that a call belongs to: denominators of its mean losses."""

    num_groups: int
    num_sequences: int
    num_tokens: int
    """Real tokens, without padding."""

    def check(self) -> None:
        """Raise ValueError unless all fields are positive integers."""
        for name, number in vars(self).items():
            if not is_whole(number) or not 0 < number < 2**63:
                raise ValueError(f"tokens.batch.{name} (={number!r}) must be a whole number above 0")


@dataclass(frozen=True)
class TokenContext:
    """Metadata of the tokens of a call. Defaults: positions in order, no padding, step 0, seed 0, training."""

    ids: Tensor | None = None
    """int64: each token's position in the global batch, the key of its random choices. `[G, S]`, the shape of x without
    its last dimension, or flat; the reversed shape is refused as ambiguous, unless a side is 1."""
    padding: Tensor | None = None
    """bool, True for padding, in the shape of `ids`."""
    step: int | Tensor = 0
    """An integer, or an int64 scalar tensor, which a captured program takes as an input."""
    seed: int = 0
    training: bool = True
    """False disables dropping and random choices."""
    sequence_tokens: int | None = None
    """Positions per sequence, of which a group has one or more; by default a group is one sequence."""
    batch: BatchCounts | None = None
    """None: the call has the whole batch."""

    def check(self, device: torch.device) -> None:
        """Raise ValueError for a field of a wrong type or dtype, or not on `device`, where the tokens are."""
        for name, tensor, dtype in (("ids", self.ids, torch.int64), ("padding", self.padding, torch.bool)):
            if tensor is None:
                continue
            if not is_dense(tensor) or tensor.dtype != dtype:
                raise ValueError(
                    f"tokens.{name} (={kind_of(tensor)}) must be a dense tensor of {dtype}; convert it"
                )
            if tensor.device != device:
                raise ValueError(
                    f"tokens.{name} (on {tensor.device}) must lie on {device}, as x does; move it"
                )
        for name, number in (("step", self.step), ("seed", self.seed)):
            if not is_whole(number) and not (name == "step" and _is_scalar(number)):
                raise ValueError(f"tokens.{name} (={number!r}) must be a whole number")
        if not isinstance(self.training, bool):
            raise ValueError(f"tokens.training (={self.training!r}) must be True or False")
        length = self.sequence_tokens
        if length is not None and (not is_whole(length) or length < 1):
            raise ValueError(f"tokens.sequence_tokens (={length!r}) must be a whole number above 0, or None")
        if self.batch is not None:
            if not isinstance(self.batch, BatchCounts):
                raise ValueError(f"tokens.batch (={self.batch!r}) must be a BatchCounts, or None")
            self.batch.check()

    def real(self, of: Tensor) -> Tensor:
        """bool `[G, S]`: True for tokens of `of` `[G, S, ...]` that are not padding."""
        if self.padding is None:
            return torch.ones(of.shape[:2], dtype=torch.bool, device=of.device)
        return ~self.padding.reshape(of.shape[:2])

    def keys(self, of: Tensor) -> Tensor:
        """int64 `[G, S]`: keys of the random choices of the tokens `of` `[G, S, ...]`."""
        if self.ids is None:
            return torch.arange(of.shape[0] * of.shape[1], device=of.device).view(of.shape[:2])
        return self.ids.reshape(of.shape[:2])


def checked(tokens: TokenContext | None, device: torch.device) -> TokenContext:
    """Return `tokens` after checking them, or the defaults for None. Raises ValueError if they are invalid."""
    if tokens is None:
        return TokenContext()
    if not isinstance(tokens, TokenContext):
        raise ValueError(f"tokens (={type(tokens).__name__}) must be a TokenContext, or None")
    tokens.check(device)
    return tokens


def is_dense(value: object) -> bool:
    """Whether `value` is a strided tensor with all its elements in this process: no meta, sparse or nested tensor, no
    DTensor."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or value.is_meta:
        return False
    return value.layout == torch.strided and not value.is_nested


def kind_of(value: object) -> str:
    """Dtype and layout of a tensor, or the type of another value, for messages."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    if is_dense(value):
        return str(value.dtype)
    kind = "a DTensor" if isinstance(value, DTensor) else "on meta" if value.is_meta else str(value.layout)
    return f"{value.dtype}, {kind}"


def check_inference(place: str, tensor: Tensor | None, others: Iterable[Tensor]) -> None:
    """Raise ValueError for an inference-mode tensor if gradients of any of `others` are tracked: autograd cannot save
    it for the backward pass."""
    if tensor is None or not tensor.is_inference() or not torch.is_grad_enabled():
        return
    if any(operand.requires_grad for operand in others):
        raise ValueError(
            f"{place} (made in inference mode) must not be given where gradients are tracked; clone it, or call "
            "under torch.no_grad()"
        )


def _is_scalar(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.int64 and value.dim() == 0


def is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)

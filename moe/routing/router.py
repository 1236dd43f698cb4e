"""Interface of routers: what they receive besides logits, and their base class."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from moe.deprecation import warn_renamed
from moe.routing.checks import is_dense, is_integer, kind_of
from moe.routing.routing import Routing
from moe.spec.routers import RouterSpec


@dataclass(frozen=True)
class BatchCounts:
    """Counts of the global batch that a call belongs to: denominators of its mean losses."""

    num_groups: int
    num_sequences: int
    num_tokens: int | Tensor
    """Real tokens, without padding: an integer, or an int64 scalar tensor."""

    def check(self) -> None:
        """Raise ValueError unless all fields are positive integers."""
        for name, number in vars(self).items():
            if name == "num_tokens" and _is_scalar(number):
                continue
            if not is_integer(number) or not 0 < number < 2**63:
                raise ValueError(f"tokens.batch.{name} (={number!r}) must be a whole number above 0")


@dataclass(frozen=True)
class TokenContext:
    """Metadata of the tokens of a call. Defaults: positions in order, no padding, step 0, seed 0, training."""

    ids: Tensor | None = None
    """int64: each token's place in the global batch, the key of its random choices; not its position in a sequence, and
    another number in decoding. `[G, S]`, the shape of x without
    its last dimension, or flat; the reversed shape is refused as ambiguous, unless a side is 1."""
    padding: Tensor | None = None
    """bool, True for padding, in the shape of `ids`."""
    step: int | Tensor = 0
    """An integer, or an int64 scalar tensor, which a captured program takes as an input."""
    seed: int = 0
    training: bool = True
    """False disables dropping and random choices."""
    sequence_tokens: int | None = None
    """Positions per sequence. A group has one or more sequences; one by default."""
    batch: BatchCounts | None = None
    """None: the call has the whole batch."""

    def check(self, device: torch.device) -> None:
        """Raise ValueError for a field of a wrong type or dtype, or not on `device`, where the tokens are."""
        for name, tensor, dtype in (("ids", self.ids, torch.int64), ("padding", self.padding, torch.bool)):
            if tensor is None:
                continue
            if not is_dense(tensor) or tensor.dtype != dtype:
                raise ValueError(f"tokens.{name} (={kind_of(tensor)}) must be a dense tensor of {dtype}; convert it")
            if tensor.device != device:
                raise ValueError(f"tokens.{name} (on {tensor.device}) must be on {device}, like x; move it")
        for name, number in (("step", self.step), ("seed", self.seed)):
            if not is_integer(number) and not (name == "step" and _is_scalar(number)):
                raise ValueError(f"tokens.{name} (={number!r}) must be a whole number")
        if not isinstance(self.training, bool):
            raise ValueError(f"tokens.training (={self.training!r}) must be True or False")
        length = self.sequence_tokens
        if length is not None and (not is_integer(length) or length < 1):
            raise ValueError(f"tokens.sequence_tokens (={length!r}) must be a whole number above 0, or None")
        if self.batch is not None:
            if not isinstance(self.batch, BatchCounts):
                raise ValueError(f"tokens.batch (={self.batch!r}) must be a BatchCounts, or None")
            self.batch.check()

    def real(self, tokens: Tensor) -> Tensor:
        """bool `[G, S]`: True where a token of `tokens` `[G, S, ...]` is not padding."""
        if self.padding is None:
            return torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        return ~self.padding.reshape(tokens.shape[:2])

    def keys(self, tokens: Tensor) -> Tensor:
        """int64 `[G, S]`: keys of the random choices of `tokens` `[G, S, ...]`."""
        if self.ids is None:
            return torch.arange(tokens.shape[0] * tokens.shape[1], device=tokens.device).view(tokens.shape[:2])
        return self.ids.reshape(tokens.shape[:2])


def resolve_context(tokens: TokenContext | None, device: torch.device) -> TokenContext:
    """Return `tokens` after checking them, or the defaults for None. Raises ValueError if they are invalid."""
    if tokens is None:
        return TokenContext()
    if not isinstance(tokens, TokenContext):
        raise ValueError(f"tokens (={type(tokens).__name__}) must be a TokenContext, or None")
    tokens.check(device)
    return tokens


def _is_scalar(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.int64 and value.dim() == 0


@dataclass(frozen=True)
class RoutingState:
    """State of one layer's router; defaults are the state before the first step."""

    bias: Tensor | None = None
    """float32 `[E]`: selection bias, added to scores for the choice but not the weights (arXiv 2408.15664)."""
    last_load: Tensor | None = None
    """`[E]`: choices of each expert in the global batch of the previous step; zeros before the first."""
    replayed: Tensor | None = None
    """int64 `[G, S, K]`, by preference: experts to use instead of the router's choices; -1 leaves a token to the
    router."""

    def apply_replay(self, choices: Tensor) -> Tensor:
        """int64 `[G, S, K]`: `choices`, replaced where there are replayed ones."""
        return choices if self.replayed is None else torch.where(self.replayed >= 0, self.replayed, choices)

    def taken(self, choices: Tensor) -> Tensor:
        """Deprecated name of `apply_replay`."""
        warn_renamed("RoutingState.taken", "RoutingState.apply_replay")
        return self.apply_replay(choices)

    def check(self, num_experts: int, device: torch.device) -> None:
        """Raise ValueError for a field that does not fit `num_experts` or `device`."""
        if self.replayed is not None and self.replayed.device != device:
            raise ValueError(f"state.replayed (on {self.replayed.device}) must be on {device}, like logits; move it")
        for name, tensor in (("bias", self.bias), ("last_load", self.last_load)):
            if tensor is None:
                continue
            if not is_dense(tensor) or tensor.is_complex():
                raise ValueError(f"state.{name} (={kind_of(tensor)}) must be a dense tensor of real numbers")
            if tensor.shape != (num_experts,):
                raise ValueError(
                    f"state.{name} {tuple(tensor.shape)} must have one value per expert, {num_experts} in all"
                )
            if tensor.device != device:
                raise ValueError(f"state.{name} (on {tensor.device}) must be on {device}, like logits; move it")

    def check_replayed(self, shape: tuple[int, ...], num_experts: int) -> None:
        """Raise ValueError unless the replayed choices are int64 in `shape` `[G, S, K]`, below `num_experts`."""
        choices = self.replayed
        assert choices is not None
        if not is_dense(choices) or choices.dtype != torch.int64:
            raise ValueError(f"state.replayed (={kind_of(choices)}) must be a dense tensor of torch.int64; convert it")
        if choices.shape != shape:
            raise ValueError(
                f"state.replayed {tuple(choices.shape)} must be {shape}: groups, tokens per group, experts per token"
            )
        if bool((choices >= num_experts).any()):
            raise ValueError(f"state.replayed (has {int(choices.max())}) must have expert numbers below {num_experts}")


SpecT = TypeVar("SpecT", bound=RouterSpec)


class Router(ABC, Generic[SpecT]):
    """Maps router logits to a `Routing`. Holds its own part of the layer's spec and no state."""

    replays: ClassVar[bool] = False
    """Whether it supports replayed choices, by `RoutingState.apply_replay`."""

    def __init__(self, spec: SpecT) -> None:
        self.spec = spec

    @abstractmethod
    def __call__(self, logits: Tensor, tokens: TokenContext, layer: int, state: RoutingState) -> Routing:
        """Route groups of tokens by `logits` `[G, S, E]`, float32 or wider.

        Groups are independent. Random choices are keyed by `layer` and by the step, seed and ids in `tokens`.
        Evaluation draws no random numbers and drops no tokens.
        """

    def choose_for_inference(self, logits: Tensor, state: RoutingState) -> tuple[Tensor, Tensor] | None:
        """(experts, weights), each `[G, S, K]`, of tokens without padding in evaluation, skipping all training
        statistics. None if the router has no shortcut."""
        return None


AnyRouter = Router[Any]


def at_least_float32(logits: Tensor) -> Tensor:
    """Return `logits` in at least float32."""
    return logits if logits.dtype == torch.float64 else logits.to(torch.float32)

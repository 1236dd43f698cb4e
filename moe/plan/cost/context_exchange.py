"""Bytes that context ranks exchange and keep, in our executor.

A rank has p positions of its rows. With e the elements of keys and values per position, q those of queries, o of
outputs, and c ranks, it receives in a layer's forward pass

- `gather`: (c - 1) p e elements; for latent attention e is the width of latents, which all tensor ranks gather
- `ring`: (c - 1) p e, of which a causal mask leaves three quarters on average, and a window of no more than a chunk
  p e (c - 1) / c
- `heads`: (c - 1) / c p (q + e r + o), where r ranks get each head of keys and values

and in the backward pass as many, but twice as many in a ring, which receives keys and values again and returns their
gradients. A ring's exchanges run beside attention; the others have nothing to run beside. Linear attention exchanges
states, which are not counted.
"""

from functools import cache
from typing import NamedTuple

from moe.spec.block import AttentionDims
from moe.spec.parallel import ContextExchange


class ReceivedElements(NamedTuple):
    """Elements that a rank receives in one layer."""

    forward: float
    backward: float


def received_elements(
    dims: AttentionDims, exchange: ContextExchange, positions: float, context: int, tensor: int, row_tokens: float
) -> ReceivedElements:
    """Elements that one of `context` ranks with `positions` positions each receives, on average over them; `row_tokens`
    are the positions of a whole row."""
    if dims.chunk:
        return ReceivedElements(0.0, 0.0)
    match exchange_of_layer(dims, exchange):
        case "gather":
            elements = (context - 1) * positions * _gathered_width(dims, tensor)
            return ReceivedElements(elements, elements)
        case "ring":
            elements = _visible_ranks(dims, context, row_tokens) * positions * key_value_width(dims) / tensor
            return ReceivedElements(elements, 2 * elements)
        case "heads":
            copies = _head_copies(dims, context, tensor)
            width = (dims.queries + dims.values + copies * key_value_width(dims)) / tensor
            elements = (context - 1) / context * positions * width
            return ReceivedElements(elements, elements)


def kept_elements(dims: AttentionDims, exchange: ContextExchange, context: int, tensor: int) -> float:
    """Elements per position that a rank keeps for the backward pass, beside those of as many positions of its own:
    gathered keys, values and latents, or copies of the heads that several ranks get."""
    if dims.chunk:
        return 0.0
    match exchange_of_layer(dims, exchange):
        case "gather":
            return (context - 1) * (key_value_width(dims) / tensor + (dims.key_value_latent or 0))
        case "ring":
            return 0.0
        case "heads":
            return (_head_copies(dims, context, tensor) - 1) * key_value_width(dims) / tensor


def _head_copies(dims: AttentionDims, context: int, tensor: int) -> float:
    """Context ranks that get each head of keys and values."""
    return max(1.0, context * tensor / dims.key_heads)


def exchange_of_layer(dims: AttentionDims, exchange: ContextExchange) -> ContextExchange:
    """The exchange of a layer under this option: an indexer always chooses among gathered keys."""
    return "gather" if dims.selection is not None else exchange


def key_value_width(dims: AttentionDims) -> float:
    """Elements per position of the keys and values of all heads."""
    return dims.key_heads * (dims.queries + dims.values) / dims.heads


def _gathered_width(dims: AttentionDims, tensor: int) -> float:
    return key_value_width(dims) / tensor if dims.key_value_latent is None else dims.key_value_latent


def _visible_ranks(dims: AttentionDims, context: int, row_tokens: float) -> float:
    """Keys and values of other ranks that a rank receives in a ring, in those of one rank, on average."""
    if not dims.causal:
        return context - 1.0
    chunk = row_tokens / (2 * context)
    return _received_chunks(context, 2 * context if dims.window is None else -(-(dims.window - 1) // chunk)) / 2


@cache
def _received_chunks(context: int, chunks_back: float) -> float:
    """Zigzag chunks of other ranks that a rank's queries see, on average: at most `chunks_back` before their own."""
    num_chunks = 2 * context
    ranks = [min(chunk, num_chunks - 1 - chunk) for chunk in range(num_chunks)]
    received = {
        (ranks[queries], keys)
        for queries in range(num_chunks)
        for keys in range(max(0, queries - int(chunks_back)), queries)
        if ranks[queries] != ranks[keys]
    }
    return len(received) / context

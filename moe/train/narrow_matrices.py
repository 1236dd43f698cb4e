"""Matrices of layers whose float32 values are needed by the optimizer alone."""

from collections.abc import Sequence

from torch import nn

from moe.layers.indexer import Indexer
from moe.parallel import LocalParameter


def narrow_matrices(parameters: Sequence[LocalParameter], model: nn.Module) -> frozenset[str]:
    """Names of the trained matrices that layers use only rounded to the compute dtype: all but the weights of an
    indexer's heads, which are multiplied in float32."""
    wide = {id(module.head_weights.weight) for module in model.modules() if isinstance(module, Indexer)}
    return frozenset(
        parameter.name for parameter in parameters
        if parameter.part.is_hidden_matrix and parameter.local.requires_grad and id(parameter.parameter) not in wide
    )  # fmt: skip

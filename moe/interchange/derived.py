"""Filling of parameters that are derived from a folder's weights: norms of rows, and trained rows of tables."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from moe.interchange.copying import fill_parameter
from moe.interchange.pieces import ParameterPiece
from moe.parallel import Layout, extent, local_parameters
from moe.parallel.derived_values import derived_values
from moe.spec import LanguageModelSpec
from moe.spec.parameter import Slices


def fill_derived(
    model: nn.Module,
    spec: LanguageModelSpec,
    layout: Layout,
    pieces: Mapping[str, tuple[ParameterPiece, ...]],
    read_tensor: Callable[[str, Slices], Tensor],
    check: Callable[[str, Tensor], None],
) -> None:
    """Fill this rank's parts of a model's derived parameters, from the `pieces` of their sources by our names."""
    derivations = {parameter.name: parameter.derivation for parameter in spec.parameters()}
    for parameter in local_parameters(model):
        if (derivation := derivations.get(parameter.name)) is None:
            continue
        module = parameter.name.rpartition(".")[0]
        source_pieces = pieces[f"{module}.{derivation.source.name.rpartition('.')[2]}"]
        dtype = parameter.local.dtype if derivation.source.form == "full" else torch.float32

        def read(
            region: Slices, dtype: torch.dtype = dtype, source_pieces: tuple[ParameterPiece, ...] = source_pieces
        ) -> Tensor:
            values = torch.empty([end - low for low, end in region], dtype=dtype)
            fill_parameter(values, [low for low, _ in region], source_pieces, read_tensor, check)
            return values

        first = [low for low, _ in extent(parameter.part, layout)]
        parameter.local.detach().copy_(derived_values(derivation, read, first, parameter.local.shape))

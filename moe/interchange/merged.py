"""Parameters of a model with its adapter merged into its matrices."""

import torch
from torch import Tensor

from moe.interchange.sources import TensorSource
from moe.spec import LanguageModelSpec
from moe.spec.adapter_names import EMBEDDING, MAGNITUDES, TABLES, TOKEN_ROWS, A, B, a_name
from moe.spec.parameter import Slices


class MergedSource(TensorSource):
    """A model's parameters with its adapters merged into their matrices."""

    def __init__(self, source: TensorSource, spec: LanguageModelSpec) -> None:
        assert spec.adapter is not None
        self._source, self._adapter = source, spec.adapter
        self._table = {parameter.name: parameter for parameter in spec.parameters()}
        self.is_collective = source.is_collective

    def read(self, name: str, region: Slices, dtype: torch.dtype | None = None) -> Tensor:
        if name in TABLES and name.replace(".weight", TOKEN_ROWS) in self._table:
            return self._with_token_rows(name, region, dtype)
        if name + B not in self._table:
            return self._source.read(name, region, dtype)
        if name + MAGNITUDES in self._table:
            return self._decomposed(name, region)
        return self._merged(name, region)

    def _merged(self, name: str, region: Slices) -> Tensor:
        """Rectangle of matrix + scale · A · B, float32 or wider."""
        matrix = self._table[name]
        *experts, first, second = region
        rank = 0, self._adapter.rank_of(name)
        is_turned = not matrix.of_experts and (name == EMBEDDING or not name.endswith(".weight"))
        inputs, outputs = (first, second) if matrix.of_experts or is_turned else (second, first)
        base = self._source.read(name, region)
        if matrix.of_experts:
            a = self._source.read(a_name(name), (*experts, inputs, rank))
            b = self._source.read(name + B, (*experts, rank, outputs))
        else:
            a = self._source.read(name + A, (rank, inputs))
            b = self._source.read(name + B, (outputs, rank))
        if not base.numel():  # this rank only sends
            return base
        wide = torch.promote_types(base.dtype, torch.float32)
        a, b = a.to(wide), b.to(wide)
        product = a @ b if matrix.of_experts else b @ a
        return base.to(wide).add(product.t() if is_turned else product, alpha=self._adapter.scale_of(name))

    def _decomposed(self, name: str, region: Slices) -> Tensor:
        """Rectangle of a matrix `[out, in]` merged with a DoRA adapter (arXiv 2402.09353, eq. 5): whole rows of it are
        read for their norms."""
        (rows, (low, end)), width = region, self._table[name].shape[1]
        merged = self._merged(name, (rows, (0, width)))
        magnitudes = self._source.read(name + MAGNITUDES, (rows,))
        if not merged.numel():
            return merged
        gains = magnitudes.to(merged.dtype) / torch.linalg.vector_norm(merged, dim=1)
        return (merged * gains[:, None])[:, low:end].contiguous()

    def _with_token_rows(self, name: str, region: Slices, dtype: torch.dtype | None) -> Tensor:
        """Rectangle of a table with its trained rows."""
        (low, end), columns = region
        assert self._adapter.trainable_token_indices is not None
        ids = self._adapter.trainable_token_indices.ids_of(name)
        table = self._source.read(name, region, dtype)
        rows = self._source.read(name.replace(".weight", TOKEN_ROWS), ((0, len(ids)), columns), dtype)
        if not table.numel():  # this rank only sends
            return table
        table = table.to(torch.promote_types(table.dtype, rows.dtype), copy=True)
        for row, token in enumerate(ids):
            if low <= token < end:
                table[token - low] = rows[row]
        return table

    def finish(self) -> None:
        self._source.finish()

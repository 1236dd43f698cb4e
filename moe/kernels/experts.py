"""Feed-forward pass of the experts by the kernels: tokens in, weighted sums by token out, forward and backward.

The rows of a token's choices are never copied: products gather them as they load. Saved are the tokens, the weights
and the first products; hidden states are computed again.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe.experts.activation import Activation
from moe.experts.feed_forward import ExpertComputation
from moe.experts.weight_gradients import WeightGradient, WeightGradients
from moe.experts.weights import ExpertSettings, ExpertWeights
from moe.kernels import combine, products
from moe.kernels.configs import Configs
from moe.kernels.descriptors import weight_operands
from moe.kernels.launch import launching_on
from moe.kernels.rows import RowMap
from moe.parallel import GradBuffer

_COLUMNS = 1024
"""Columns of one pass of the kernels that sum rows."""


@dataclass(frozen=True)
class FusedComputation(ExpertComputation):
    """Computation by the experts on this rank, of tokens instead of rows."""

    rows: RowMap
    activation: Activation
    configs: Configs
    recompute: bool = False
    """Recompute the products of the first matrices in the backward pass instead of saving them."""

    def run(self, rows: Tensor, scale: Tensor, weights: ExpertWeights) -> Tensor:
        """Return `[T, M]`: the sum of each token's expert outputs times `scale` `[T, K]`, for tokens `rows` `[T, M]`.
        Differentiable in both and in `weights`, which may have a wider dtype than the tokens."""
        tokens, scale = rows.contiguous(), scale.contiguous()
        return _FusedFeedForward.apply(tokens, scale, self, weights.settings, *weights.tensors)

    @property
    def num_experts(self) -> int:
        return self.rows.first_row_E.numel() - 1

    @property
    def num_rows(self) -> int:
        """Upper bound of the number of rows."""
        return self.rows.choice_n.numel()

    @property
    def per_token(self) -> int:
        return self.rows.row_TK.shape[1]

    def num_row_tiles(self, block_rows: int) -> int:
        """Upper bound on the number of tiles of `block_rows` rows of one expert."""
        return self.num_rows // block_rows + min(self.num_experts, self.num_rows)

    @property
    def constants(self) -> dict[str, Any]:
        """Compile-time constants of kernels with the activation in their epilogue."""
        alpha, limit = self.activation.settings or (1.0, 1.0)
        name, is_gated = self.activation.name, self.activation.is_gated
        return {"ACTIVATION": name, "ALPHA": alpha, "LIMIT": limit, "IS_GATED": is_gated}

    def launch_tiles(self, kernel: Any, columns: int, *arguments: Any, **constants: Any) -> None:
        """Launch a kernel over tiles of rows by columns."""
        config = self.configs.for_kernel(kernel)
        num_tiles = self.num_row_tiles(config.block_rows)
        programs = max(1, min(self.configs.num_programs, num_tiles * triton.cdiv(columns, config.block_columns)))
        kernel[programs,](
            *arguments, num_tiles=num_tiles, num_experts=self.num_experts, PER_TOKEN=self.per_token,
            EXPERTS=triton.next_power_of_2(self.num_experts), PRECISION=self.configs.precision,
            BLOCK_ROWS=config.block_rows, BLOCK_COLUMNS=config.block_columns, BLOCK_INNER=config.block_inner,
            num_warps=config.num_warps, num_stages=config.num_stages, **constants,
        )  # fmt: skip

    def product(
        self,
        *terms: tuple[Tensor, Tensor],
        gathers: bool = False,
        bias: Tensor | None = None,
        first_bias: int = 0,
        scale: float = 1.0,
    ) -> Tensor:
        """`[n, B]`: scale times the sum over `terms` of rows `[n, A]` times matrices `[E, A, B]`, plus `bias` `[E, b]`
        from column `first_bias` on. If it `gathers`, the first rows are those of the tokens `[T, A]`."""
        first_rows, first_matrix = terms[0]
        y = first_rows.new_empty(self.num_rows, first_matrix.shape[2])
        padded_terms = [*terms, *[terms[0]] * (3 - len(terms))]
        matrices = [matrix for _, matrix in padded_terms]
        weights, access = weight_operands(matrices, self.configs.for_kernel(products.product))
        operands = [
            operand for (rows, _), weight in zip(padded_terms, weights, strict=True) for operand in (rows, weight)
        ]
        widths = [rows.shape[1] for rows, _ in padded_terms]
        strides = [stride for matrix in matrices for stride in matrix.stride()]
        bias_width = 0 if bias is None else bias.shape[1]
        self.launch_tiles(
            products.product, y.shape[1], y, self.rows.first_row_E, self.rows.choice_n, *operands,
            y if bias is None else bias,
            **dict(zip(_PRODUCT_SIZES, (y.shape[1], *widths, *strides, first_bias, bias_width, scale), strict=True)),
            GATHERS=gathers, TERMS=len(terms), HAS_BIAS=bias is not None, ACCESS=access,
        )  # fmt: skip
        return y

    def combine(self, rows: Tensor, weight_TK: Tensor | None) -> Tensor:
        """`[T, M]`: sum of each token's `rows` `[n, M]`, times their weights if there are any."""
        num_tokens, width = self.rows.row_TK.shape[0], rows.shape[1]
        y = rows.new_empty(num_tokens, width)
        if num_tokens:
            block = min(_COLUMNS, triton.next_power_of_2(width))
            combine.combine[num_tokens,](
                rows, self.rows.row_TK, self.rows.row_TK if weight_TK is None else weight_TK, y, width,
                PER_TOKEN=self.per_token, IS_WEIGHTED=weight_TK is not None, BLOCK=block,
            )  # fmt: skip
        return y

    def accumulate(self, x: Tensor, d_y: Tensor, gradient: WeightGradient | None, gathers: str = "") -> None:
        """Add x transposed · d_y over each expert's rows to the gradient. `gathers` names the operand, `x` or `d_y`,
        whose rows are those of the tokens."""
        if gradient is not None:
            gradient.add(partial(self._write_product, x, d_y, gathers))

    def _write_product(self, x: Tensor, d_y: Tensor, gathers: str, buffer: GradBuffer) -> None:
        config = self.configs.for_kernel(products.weight_gradient)
        num_inputs, num_outputs = x.shape[1], d_y.shape[1]
        sums, adds = _output_for(buffer, (self.num_experts, num_inputs, num_outputs), x.device)
        tiles = triton.cdiv(num_inputs, config.block_rows) * triton.cdiv(num_outputs, config.block_columns)
        products.weight_gradient[tiles, self.num_experts](
            x, d_y, self.rows.choice_n, self.rows.first_row_E, sums, num_inputs, num_outputs, PER_TOKEN=self.per_token,
            GATHERS_X=gathers == "x", GATHERS_D_Y=gathers == "d_y", ADDS=adds, PRECISION=self.configs.precision,
            BLOCK_INPUTS=config.block_rows, BLOCK_OUTPUTS=config.block_columns, BLOCK_ROWS=config.block_inner,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
        _commit(buffer, sums)

    def sum_by_expert(
        self, rows: Tensor, columns: slice, gradient: WeightGradient | None, weight_TK: Tensor | None = None
    ) -> None:
        """Add the sums `[E, columns]` of each expert's rows to the gradient. With `weight_TK`, `rows` are those of the
        tokens, and are multiplied by it."""
        if gradient is not None:
            gradient.add(partial(self._write_sums, rows, columns, weight_TK))

    def _write_sums(self, rows: Tensor, columns: slice, weight_TK: Tensor | None, buffer: GradBuffer) -> None:
        sums, adds = _output_for(buffer, (self.num_experts, columns.stop - columns.start), rows.device)
        block = min(_COLUMNS // 8, triton.next_power_of_2(sums.shape[1]))
        combine.sum_by_expert[triton.cdiv(sums.shape[1], block), self.num_experts](
            rows, self.rows.choice_n, self.rows.first_row_E, rows if weight_TK is None else weight_TK, sums,
            rows.shape[1], columns.start, sums.shape[1], PER_TOKEN=self.per_token, GATHERS=weight_TK is not None,
            ADDS=adds, BLOCK_ROWS=32, BLOCK=block,
        )  # fmt: skip
        _commit(buffer, sums)

    def first_products(
        self, x_TM: Tensor, w: ExpertWeights, *, writes_products: bool, writes_hidden: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return (up, gate, hidden states), each `[n, H]`, or None if it is not written."""
        model_dim, hidden_dim = w.w_in.shape[1:]

        def rows(*, written: bool) -> Tensor | None:
            return x_TM.new_empty(self.num_rows, hidden_dim) if written else None

        up, hidden = rows(written=writes_products), rows(written=writes_hidden)
        gate = rows(written=writes_products and self.activation.is_gated)
        low, rank = self.low_rank(x_TM, w), 0 if w.in_lora_b is None else w.in_lora_b.shape[1]
        matrices = (w.w_in, w.w_in if w.w_gate is None else w.w_gate)
        weights, access = weight_operands(matrices, self.configs.for_kernel(products.first_products))
        pointers = (w.b_in, w.b_gate, low, w.in_lora_b, w.gate_lora_b, up, gate, hidden)
        self.launch_tiles(
            products.first_products, hidden_dim, x_TM, self.rows.choice_n, self.rows.first_row_E, *weights,
            *(x_TM if tensor is None else tensor for tensor in pointers),
            **dict(zip(_FIRST_SIZES, (model_dim, hidden_dim, *w.w_in.stride()), strict=True)),
            RANK=rank, BLOCK_RANK=_block_rank(rank), HAS_BIAS=w.b_in is not None,
            HAS_GATE_BIAS=w.b_gate is not None, WRITES_PRODUCTS=writes_products,
            WRITES_HIDDEN=writes_hidden, ACCESS=access, **self.constants,
        )  # fmt: skip
        return up, gate, hidden

    def low_rank(self, x_TM: Tensor, w: ExpertWeights) -> Tensor | None:
        """`[n, r]`: scale · x[token] · in_lora_a[e]."""
        if w.in_lora_a is None:
            return None
        return self.product((x_TM, w.in_lora_a), gathers=True, scale=w.settings.in_lora_scale)

    def forward_pass(
        self, x_TM: Tensor, weight_TK: Tensor, w: ExpertWeights, *, saves: bool
    ) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
        """(sums by token `[T, M]`, products that `backward_pass` needs). `w` has the dtype of the tokens."""
        with launching_on(x_TM.device):  # in the backward pass, autograd makes it current
            w = _with_kernel_strides(w)
            up, gate, hidden = self.first_products(x_TM, w, writes_products=saves, writes_hidden=True)
            assert hidden is not None
            terms = [(hidden, w.w_out)]
            if w.out_lora_a is not None:
                assert w.out_lora_b is not None
                terms.append((self.product((hidden, w.out_lora_a), scale=w.settings.out_lora_scale), w.out_lora_b))
            rows = self.product(*terms, bias=w.b_out, first_bias=w.settings.b_out_first)
            del hidden, terms
            return self.combine(rows, weight_TK), (up, gate)

    def backward_pass(
        self,
        d_y_TM: Tensor,
        x_TM: Tensor,
        weight_TK: Tensor,
        w: ExpertWeights,
        saved_products: tuple[Tensor | None, Tensor | None],
        gradients: WeightGradients,
    ) -> tuple[Tensor, Tensor]:
        """(gradient of the tokens, gradient of the choices' weights). Those of the experts' weights go to
        `gradients`."""
        w = _with_kernel_strides(w)
        up, gate = saved_products
        if up is None:
            up, gate, _ = self.first_products(x_TM, w, writes_products=True, writes_hidden=False)
        d_low_out = None
        if w.out_lora_b is not None:
            d_low_out = self.product(
                (d_y_TM, w.out_lora_b.transpose(1, 2)), gathers=True, scale=w.settings.out_lora_scale
            )
        d_up, d_gate, hidden, d_weight_TK = self.hidden_gradients(d_y_TM, weight_TK, w, (up, gate), d_low_out)
        del up, gate
        self.accumulate(hidden, d_y_TM, gradients.w_out, gathers="d_y")
        if w.out_lora_a is not None:
            assert d_low_out is not None
            low_out = self.product((hidden, w.out_lora_a), scale=w.settings.out_lora_scale)
            self.accumulate(low_out, d_y_TM, gradients.out_lora_b, gathers="d_y")
            self.accumulate(hidden, d_low_out, gradients.out_lora_a)
        del hidden, d_low_out

        terms = [(d_up, w.w_in.transpose(1, 2))]
        if d_gate is not None:
            assert w.w_gate is not None
            terms.append((d_gate, w.w_gate.transpose(1, 2)))
        if w.in_lora_a is not None:
            terms.append((self._adapter_gradients(x_TM, d_up, d_gate, w, gradients), w.in_lora_a.transpose(1, 2)))
        d_x_TM = self.combine(self.product(*terms), None)
        hidden_columns = slice(0, d_up.shape[1])
        if w.b_in is not None:
            self.sum_by_expert(d_up, hidden_columns, gradients.b_in)
        if w.b_out is not None:
            self.sum_by_expert(d_y_TM, w.bias_columns, gradients.b_out, weight_TK)
        if w.b_gate is not None and d_gate is not None:
            self.sum_by_expert(d_gate, hidden_columns, gradients.b_gate)
        self.accumulate(x_TM, d_up, gradients.w_in, gathers="x")
        if d_gate is not None:
            self.accumulate(x_TM, d_gate, gradients.w_gate, gathers="x")
        return d_x_TM, d_weight_TK

    def hidden_gradients(
        self,
        d_y_TM: Tensor,
        weight_TK: Tensor,
        w: ExpertWeights,
        saved_products: tuple[Tensor | None, Tensor | None],
        d_low: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """(gradients of up and gate, weighted hidden states, each `[n, H]`; gradient of the choices' weights
        `[T, K]`)."""
        (up, gate), hidden_dim = saved_products, w.w_out.shape[1]
        assert up is not None
        d_up, hidden = torch.empty_like(up), torch.empty_like(up)
        d_gate = None if gate is None else torch.empty_like(gate)
        num_parts = triton.cdiv(hidden_dim, self.configs.for_kernel(products.hidden_gradients).block_columns)
        parts = torch.empty(num_parts, self.num_rows, dtype=torch.float32, device=up.device)
        rank = 0 if d_low is None else d_low.shape[1]
        w_out_MH = w.w_out.transpose(1, 2)
        (w_out,), access = weight_operands([w_out_MH], self.configs.for_kernel(products.hidden_gradients))
        pointers = (d_low, w.out_lora_a, up, gate, d_up, d_gate, hidden, parts)
        self.launch_tiles(
            products.hidden_gradients, hidden_dim, d_y_TM, self.rows.choice_n, self.rows.first_row_E, weight_TK,
            w_out, *(d_y_TM if tensor is None else tensor for tensor in pointers),
            **dict(zip(_HIDDEN_SIZES, (self.num_rows, d_y_TM.shape[1], hidden_dim, *w.w_out.stride()), strict=True)),
            RANK=rank, BLOCK_RANK=_block_rank(rank), ACCESS=access, **self.constants,
        )  # fmt: skip
        d_weight_TK, b_out = torch.empty_like(weight_TK), w.b_out
        if d_y_TM.shape[0]:
            combine.gradients_of_weights[d_y_TM.shape[0],](
                parts, self.rows.row_TK, self.rows.expert_TK, d_y_TM, d_y_TM if b_out is None else b_out, d_weight_TK,
                self.num_rows, d_y_TM.shape[1], w.settings.b_out_first, 0 if b_out is None else b_out.shape[1],
                PER_TOKEN=self.per_token, PARTS=num_parts, BLOCK_PARTS=triton.next_power_of_2(num_parts),
                HAS_BIAS=b_out is not None, BLOCK=_COLUMNS,
            )  # fmt: skip
        return d_up, d_gate, hidden, d_weight_TK

    def _adapter_gradients(
        self, x_TM: Tensor, d_up: Tensor, d_gate: Tensor | None, w: ExpertWeights, gradients: WeightGradients
    ) -> Tensor:
        """`[n, r]`: gradient of x · in_lora_a[e]. Those of the first adapters go to `gradients`."""
        assert w.in_lora_b is not None
        low = self.low_rank(x_TM, w)
        assert low is not None
        terms = [(d_up, w.in_lora_b.transpose(1, 2))]
        self.accumulate(low, d_up, gradients.in_lora_b)
        if d_gate is not None:
            assert w.gate_lora_b is not None
            terms.append((d_gate, w.gate_lora_b.transpose(1, 2)))
            self.accumulate(low, d_gate, gradients.gate_lora_b)
        d_low = self.product(*terms, scale=w.settings.in_lora_scale)
        self.accumulate(x_TM, d_low, gradients.in_lora_a, gathers="x")
        return d_low


_FIRST_SIZES = ("model_dim", "hidden_dim", "stride_e", "stride_m", "stride_h")
_HIDDEN_SIZES = ("num_rows", "model_dim", "hidden_dim", "stride_e", "stride_h", "stride_m")
_PRODUCT_SIZES = (
    "num_columns", "width_1", "width_2", "width_3", "stride_e_1", "stride_inner_1", "stride_column_1", "stride_e_2",
    "stride_inner_2", "stride_column_2", "stride_e_3", "stride_inner_3", "stride_column_3", "first_bias", "num_bias",
    "scale",
)  # fmt: skip


def _block_rank(rank: int) -> int:
    """Block of the inner dimension of an adapter's product."""
    return max(16, min(64, triton.next_power_of_2(rank)))


def _output_for(buffer: GradBuffer, shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, bool]:
    """(tensor to write a gradient to, whether to add): the buffer's own memory if contiguous, else a temporary."""
    memory = buffer.allocate(shape, device)
    return (memory, buffer.adds) if memory.is_contiguous() else (memory.new_empty(shape), False)


def _commit(buffer: GradBuffer, sums: Tensor) -> None:
    """Put sums written to `_output_for` into the buffer."""
    if buffer.tensor is None or sums is buffer.tensor:
        buffer.set_sum(sums)
    else:
        buffer.write(sums)


def _with_kernel_strides(weights: ExpertWeights) -> ExpertWeights:
    """`weights` with strides that the kernels support: equal ones of `w_in` and `w_gate`; all tensors except matrices
    contiguous."""
    w_in, w_out, w_gate, *others = weights.tensors
    assert w_in is not None
    if w_gate is not None and w_gate.stride() != w_in.stride():
        w_in, w_gate = w_in.contiguous(), w_gate.contiguous()
    contiguous = (None if tensor is None else tensor.contiguous() for tensor in others)
    return ExpertWeights.from_tensors((w_in, w_out, w_gate, *contiguous), weights.settings)


class _FusedFeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TM: Tensor, weight_TK: Tensor, experts: FusedComputation, settings: ExpertSettings,
        *tensors: Tensor | None,
    ) -> Tensor:  # fmt: skip
        weights = ExpertWeights.from_tensors(tensors, settings).narrow(x_TM.dtype)
        saves = any(ctx.needs_input_grad) and not experts.recompute
        y_TM, saved_products = experts.forward_pass(x_TM, weight_TK, weights, saves=saves)
        ctx.save_for_backward(x_TM, weight_TK, *saved_products, *weights.tensors)
        ctx.experts, ctx.settings, ctx.parameters = experts, settings, tensors
        return y_TM

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_TM, weight_TK, up, gate, *tensors = ctx.saved_tensors
        weights = ExpertWeights.from_tensors(tensors, ctx.settings)
        weight_gradients = WeightGradients(ctx.parameters)
        d_x_TM, d_weight_TK = ctx.experts.backward_pass(
            gradients[0].contiguous(), x_TM, weight_TK, weights, (up, gate), weight_gradients
        )
        return d_x_TM, d_weight_TK, None, None, *weight_gradients.to_autograd()

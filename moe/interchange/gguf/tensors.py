"""Tensors of a GGUF file, and the parameters that each is built from.

Experts of a layer are one tensor, `[expert, out, in]`. The up-projection of latent attention is two, so that llama.cpp
can absorb them into queries and outputs: keys transposed, `[head, rank, dim]`, and values, `[head, dim, rank]`.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import pi

import torch
from torch import Tensor

from moe.interchange.family import TensorRow, sizes_of
from moe.interchange.fitting import expected_tensors
from moe.interchange.gguf.architecture import Architecture, rotated_attention
from moe.interchange.gguf.recurrent import recurrent_rows, recurrent_sizes
from moe.interchange.pieces import ParameterPiece
from moe.spec import LanguageModelSpec
from moe.spec.language import GroupedQueryAttentionSpec, LatentAttentionSpec
from moe.spec.rope import Llama3Scaling

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_ENDS = {"embedding.weight": "token_embd.weight", "output.weight": "output.weight"}
_MLP = "feed_forward.moe"
_NO_ROTATION = 1e30
"""Divisor of the frequency of dimensions that are not rotated."""
_ROWS = (
    TensorRow("norm.weight", "attn_norm.weight"),
    *(TensorRow(f"attention.{name}.{kind}", f"{tensor_name}.{kind}")
      for name, tensor_name in (("query", "attn_q"), ("key", "attn_k"), ("value", "attn_v"),
                                ("output", "attn_output")) for kind in ("weight", "bias")),
    TensorRow("attention.key_norm.weight", "attn_k_norm.weight"),
    TensorRow("post_norm.weight", "post_attention_norm.weight"),
    TensorRow("feed_forward.post_norm.weight", "post_ffw_norm.weight"),
    TensorRow("attention.sinks", "attn_sinks.weight"),
    TensorRow("attention.query_down.weight", "attn_q_a.weight"),
    TensorRow("attention.query_up.weight", "attn_q_b.weight"),
    TensorRow("attention.key_value_down.weight", "attn_kv_a_mqa.weight"),
    TensorRow("attention.key_value_norm.weight", "attn_kv_a_norm.weight"),
    TensorRow("attention.key_value_up.weight", "attn_k_b.weight", "(head keys@0/$up) r", "head r keys"),
    TensorRow("attention.key_value_up.weight", "attn_v_b.weight", "(head values@$keys/$up) r", "head values r"),
    *(TensorRow(f"feed_forward.dense.{name}.weight", f"{tensor_name}.weight")
      for name, tensor_name in (("w_gate", "ffn_gate"), ("w_in", "ffn_up"), ("w_out", "ffn_down"))),
    TensorRow(f"{_MLP}.router", "ffn_gate_inp.weight", "m e", "e m"),
    TensorRow(f"{_MLP}.logit_bias", "ffn_gate_inp.bias"),
    TensorRow(f"{_MLP}.latent_in", "ffn_latent_down.weight", "a b", "b a"),
    TensorRow(f"{_MLP}.latent_out", "ffn_latent_up.weight", "a b", "b a"),
    TensorRow(f"{_MLP}.router_bias", "exp_probs_b.bias"),
    *(TensorRow(f"{_MLP}.experts.{name}", f"{tensor_name}_exps.weight", axes, turned_axes)
      for name, tensor_name, axes, turned_axes in (
          ("w_gate", "ffn_gate", "e m h", "e h m"), ("w_in", "ffn_up", "e m h", "e h m"),
          ("w_out", "ffn_down", "e h m", "e m h"))),
    *(TensorRow(f"{_MLP}.experts.{name}", f"{tensor_name}_exps.bias")
      for name, tensor_name in (("b_gate", "ffn_gate"), ("b_in", "ffn_up"), ("b_out", "ffn_down"))),
    *(TensorRow(f"{_MLP}.shared.{name}", f"{tensor_name}_shexp.weight", "a b", "b a")
      for name, tensor_name in (("w_gate", "ffn_gate"), ("w_in", "ffn_up"), ("w_out", "ffn_down"))),
    TensorRow(f"{_MLP}.shared.gate", "ffn_gate_inp_shexp.weight", "m 1", "m"),
)  # fmt: skip
"""Tensors of a layer, without the prefix `blk.{layer}.`."""
_BRANCH_ROWS = (
    TensorRow("scalar", "layer_output_scale.weight"),
    TensorRow(f"{_MLP}.router_scale", "ffn_gate_inp.scale"),
    TensorRow(f"{_MLP}.expert_scale", "ffn_down_exps.scale"),
    TensorRow(f"{_MLP}.norm.weight", "pre_ffw_norm_2.weight"),
    TensorRow(f"{_MLP}.post_norm.weight", "post_ffw_norm_2.weight"),
    TensorRow(f"{_MLP}.shared_norm.weight", "ffn_norm.weight"),
    TensorRow(f"{_MLP}.shared_post_norm.weight", "post_ffw_norm_1.weight"),
    TensorRow(f"{_MLP}.experts.w_gate", "ffn_gate_up_exps.weight", "e m h", "e (0/2 h) m"),
    TensorRow(f"{_MLP}.experts.w_in", "ffn_gate_up_exps.weight", "e m h", "e (1/2 h) m"),
    *(TensorRow(f"{_MLP}.shared.{name}", f"{tensor_name}.weight", "a b", "b a")
      for name, tensor_name in (("w_gate", "ffn_gate"), ("w_in", "ffn_up"), ("w_out", "ffn_down"))),
)  # fmt: skip
"""Tensors of a layer whose shared experts are a dense layer beside the others, where they are not in `_ROWS`."""


@dataclass(frozen=True)
class GgufTensor:
    """Tensor of a GGUF file."""

    name: str
    shape: tuple[int, ...]
    """Outermost dimension first; the file has the reverse order."""
    components: tuple[tuple[str, ParameterPiece, int], ...] = ()
    """(our name, piece, 0), as in `copying.fill_folder_tensor`."""
    values: Tensor | None = None
    """Values of a tensor that is no parameter."""
    transform: Callable[[Tensor], Tensor] | None = None
    """Function of its parameter, element by element."""


def gguf_tensors(spec: LanguageModelSpec, architecture: Architecture) -> Iterator[GgufTensor]:
    """Yield the tensors of a model in an architecture that `architecture_of` returned for it."""
    if (divisors := _rope_divisors(rotated_attention(spec))) is not None:
        yield GgufTensor("rope_freqs.weight", tuple(divisors.shape), values=divisors)
    sizes = _sizes(spec)
    tensors: dict[str, GgufTensor] = {}
    for parameter in expected_tensors(spec):
        for row in _rows(spec, architecture, parameter.name):
            piece = row.piece(parameter.shape, None, sizes)
            draft = GgufTensor(row.tensor_name, piece.tensor_side.shape, transform=_transform_of(spec, row))
            tensor = tensors.get(row.tensor_name, draft)
            tensors[tensor.name] = replace(tensor, components=(*tensor.components, (parameter.name, piece, 0)))
    yield from tensors.values()


def _transform_of(spec: LanguageModelSpec, row: TensorRow) -> Callable[[Tensor], Tensor] | None:
    if row.tensor_name.endswith("ssm_a"):
        return lambda logarithm: -logarithm.exp()
    if spec.norm_one_plus and row.parameter_name.endswith("norm.weight") and "ssm_" not in row.tensor_name:
        return lambda weight: 1 + weight
    return None


def _sizes(spec: LanguageModelSpec) -> dict[str, int]:
    attention = spec.attention
    if isinstance(attention, LatentAttentionSpec):
        return {"head": attention.num_heads, "keys": attention.head_dim, "values": attention.value_dim,
                "up": attention.head_dim + attention.value_dim}  # fmt: skip
    return {
        **sizes_of(spec),
        **recurrent_sizes(spec),
        "query_head": attention.num_heads,
        "key_head": attention.num_kv_heads,
        "half": 2,
    }


def _rows(spec: LanguageModelSpec, architecture: Architecture, name: str) -> Iterator[TensorRow]:
    """Yield the rows of one of our tensors, with the layer in their names."""
    if name in _ENDS or name == "norm.weight":
        yield TensorRow(name, _ENDS.get(name, f"{architecture.final_norm}.weight"))
        return
    match = _LAYER.fullmatch(name)
    assert match is not None, name
    layer, name_in_layer = match[1], match[2]
    special_names = {
        "feed_forward.norm.weight": f"{architecture.feed_forward_norm}.weight",
        "attention.query_norm.weight": "attn_q_a_norm.weight" if spec.attention.kind == "latent"
        else "attn_q_norm.weight",
    }  # fmt: skip
    is_recurrent = spec.has_attention(int(layer)) and not spec.has_full_attention(int(layer))
    layer_rows = (*recurrent_rows(spec), *_ROWS) if is_recurrent else _ROWS
    branch_names = {row.parameter_name for row in _BRANCH_ROWS} if architecture.dense_branch else set()
    rows = [row for row in (_BRANCH_ROWS if name_in_layer in branch_names else layer_rows)
            if row.parameter_name == name_in_layer]  # fmt: skip
    if is_recurrent and len(rows) > 1 and name_in_layer == "attention.output.weight":
        rows = rows[:1]
    if name_in_layer in special_names:
        rows = [TensorRow(name_in_layer, special_names[name_in_layer])]
    assert rows, name
    if architecture.fuses_queries and (match := re.fullmatch(r"attention\.(query|key|value)\.weight", name_in_layer)):
        assert isinstance(spec.attention, GroupedQueryAttentionSpec)
        num_rows = _rows_of_queries(spec.attention)
        begin = sum(num_rows[kind] for kind in list(num_rows)[: list(num_rows).index(match[1])])
        place = f"(r)@{begin}/{sum(num_rows.values())}"
        rows = [TensorRow(name_in_layer, "attn_qkv.weight", "r m", f"{place} m")]
    for row in rows:
        axes, tensor_axes = row.parameter_axes, row.tensor_axes
        if architecture.permutes_queries and re.fullmatch(r"attention\.(query|key)\.(weight|bias)", name_in_layer):
            heads = "query_head" if ".query." in name_in_layer else "key_head"
            columns = " m" if name_in_layer.endswith("weight") else ""
            axes, tensor_axes = f"({heads} half d){columns}", f"({heads} d half){columns}"
        yield TensorRow(name, f"blk.{layer}.{row.tensor_name}", axes, tensor_axes)


def _rows_of_queries(attention: GroupedQueryAttentionSpec) -> dict[str, int]:
    """Rows of queries, keys and values in their common matrix, in order."""
    return {
        "query": attention.num_heads * attention.head_dim,
        "key": attention.num_kv_heads * attention.head_dim,
        "value": attention.num_kv_heads * attention.value_head_dim,
    }


def _rope_divisors(attention: GroupedQueryAttentionSpec | LatentAttentionSpec) -> Tensor | None:
    """Divisor of each frequency, where llama.cpp reads them from a tensor."""
    rope = attention.rope
    if not isinstance(attention, GroupedQueryAttentionSpec):
        return None
    if isinstance(rope.scaling, Llama3Scaling):
        return _divisors(rope.scaling, rope.base, rope.rotated_dim(attention.head_dim))
    if rope.proportional:
        pairs, num_rotating = attention.head_dim // 2, rope.num_rotating_pairs(attention.head_dim)
        return torch.where(torch.arange(pairs) < num_rotating, 1.0, _NO_ROTATION)
    return None


def _divisors(scaling: Llama3Scaling, base: float, dim: int) -> Tensor:
    """Divisor of each frequency of Llama 3.1's RoPE, float32 `[dim / 2]`, computed in float64."""
    frequencies = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    rotations = scaling.original_tokens * frequencies / (2 * pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    share = ((rotations - low) / (high - low)).clamp(0, 1) if high > low else (rotations >= high).double()
    return (1 / ((1 - share) / scaling.factor + share)).float()

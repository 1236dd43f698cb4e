"""Layers of Gated DeltaNet, of Mamba-2 and of short convolutions in GGUF files: their tensors and hyperparameters.

In Gated DeltaNet, value heads that share a key head are neighbours in Qwen3-Next. In Qwen3.5 llama.cpp stores first the
first value head of every key head, then the second of each, and so on.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from moe.interchange.families.decoder import mamba2
from moe.interchange.family import LAYER, TensorRow
from moe.spec import LanguageModelSpec, Problem
from moe.spec.language import GatedDeltaNetSpec, Mamba2Spec, ShortConvolutionSpec

if TYPE_CHECKING:
    from gguf import GGUFWriter

REMEDY = "export it with --format huggingface"
_MAMBA2 = {
    "in_proj": "ssm_in", "conv1d": "ssm_conv1d", "dt_bias": "ssm_dt.bias", "out_proj": "ssm_out",
}  # fmt: skip
_HEADS = {"decay": "ssm_a", "skip": "ssm_d"}
"""Values of heads, which are columns in llama.cpp. `ssm_a` is the negative rate of decay."""


def recurrent_rows(spec: LanguageModelSpec) -> tuple[TensorRow, ...]:
    """Tensors of a layer with linear attention, without the prefix `blk.{layer}.`."""
    if isinstance(spec.linear_attention, Mamba2Spec):
        return tuple(_rows_of_mamba2())
    if isinstance(spec.linear_attention, GatedDeltaNetSpec):
        return tuple(_rows_of_delta_net(spec.linear_attention.split_projections))
    if isinstance(spec.linear_attention, ShortConvolutionSpec):
        return (
            TensorRow("attention.projection.weight", "shortconv.in_proj.weight", "(c parts) m", "(parts c) m"),
            TensorRow("attention.convolution.weight", "shortconv.conv.weight"),
            TensorRow("attention.output.weight", "shortconv.out_proj.weight"),
        )
    return ()


def _rows_of_mamba2() -> Iterator[TensorRow]:
    """Yield the rows of the Hugging Face layout under llama.cpp's names."""
    for row in mamba2("mixer"):
        name = row.parameter_name.removeprefix(LAYER).replace("linear_attention.", "attention.")
        module, _, kind = row.tensor_name.removeprefix(f"model.{LAYER}mixer.").partition(".")
        if name.removeprefix("attention.") in _HEADS:
            yield TensorRow(name, _HEADS[name.removeprefix("attention.")], "h", "h 1")
        elif module == "norm":
            yield TensorRow(name, "ssm_norm.weight", "(group r)", "group r")
        else:
            axes = None if row.tensor_axes is None else row.tensor_axes.replace(" 1 w", " w")
            yield TensorRow(name, ".".join(filter(None, (_MAMBA2[module], kind))), row.parameter_axes, axes)


def _rows_of_delta_net(is_split: bool) -> Iterator[TensorRow]:
    """Yield the rows of Qwen3-Next's layers, or of Qwen3.5's, whose projections are split."""
    heads = "r j" if is_split else "j r"
    yield from _queries_keys_values("convolution", "ssm_conv1d.weight", "w", "units", heads)
    if is_split:
        yield from _queries_keys_values("projection", "attn_qkv.weight", "m", "units", heads)
        yield TensorRow("attention.gate.weight", "attn_gate.weight", "(j r d) m", f"({heads} d) m")
        yield TensorRow("attention.strength.weight", "ssm_beta.weight", "(j r) m", f"({heads}) m")
        yield TensorRow("attention.step.weight", "ssm_alpha.weight", "(j r) m", f"({heads}) m")
    else:
        yield from _queries_keys_values("projection", "attn_qkv.weight", "m", "units_with_gates", heads)
        gates = "(j r@$units/$units_with_gates d) m"
        yield TensorRow("attention.projection.weight", "attn_gate.weight", gates, f"({heads} d) m")
        yield TensorRow("attention.decays.weight", "ssm_ba.weight")
    yield TensorRow("attention.decay", "ssm_a", "(j r)", f"({heads})")
    yield TensorRow("attention.time_step", "ssm_dt.bias", "(j r)", f"({heads})")
    yield TensorRow("attention.value_norm.weight", "ssm_norm.weight")
    yield TensorRow("attention.output.weight", "ssm_out.weight", "m (j r d)", f"m ({heads} d)")


def _queries_keys_values(name: str, tensor: str, columns: str, units: str, heads: str) -> Iterator[TensorRow]:
    """Yield the rows of queries, keys and values: ours are ordered by key head, in units of a head's size."""
    places = (("0/", "j d", "0"), ("1/", "j d", "$queries"), ("r@2/", f"{heads} d", "$keys"))
    for unit, tensor_rows, begin in places:
        parameter_axes = f"(j {unit}${units} d) {columns}"
        yield TensorRow(f"attention.{name}.weight", tensor, parameter_axes, f"({tensor_rows})@{begin}/$rows {columns}")


def recurrent_sizes(spec: LanguageModelSpec) -> dict[str, int]:
    """Lengths that the rows name, in addition to those of the Hugging Face layout."""
    linear = spec.linear_attention
    if not isinstance(linear, GatedDeltaNetSpec):
        return {}
    units = 2 + linear.values_per_key
    return {"r": linear.values_per_key, "d": linear.key_dim, "units": units,
            "units_with_gates": units + linear.values_per_key}  # fmt: skip


def recurrent_problems(spec: LanguageModelSpec, rule: str) -> Iterator[Problem]:
    """Yield what llama.cpp does not compute of layers with linear attention."""
    linear = spec.linear_attention
    if not isinstance(linear, GatedDeltaNetSpec):
        return
    if linear.value_dim != linear.key_dim:
        rule_of_sizes = f"{rule}, whose value heads have the size of key heads (={linear.key_dim})"
        yield Problem("unsupported", "model.linear_attention.value_dim", linear.value_dim, rule_of_sizes, REMEDY)
    full_layers = [layer for layer in range(spec.num_layers) if spec.has_full_attention(layer)]
    interval = _full_attention_interval(spec)
    if full_layers != list(range(interval - 1, spec.num_layers, interval)):
        yield Problem("unsupported", "model.layers with full attention", full_layers, rule, REMEDY)


def _full_attention_interval(spec: LanguageModelSpec) -> int:
    """Distance of layers with full attention, if it is regular."""
    layers = range(spec.num_layers)
    return next((layer + 1 for layer in layers if spec.has_full_attention(layer)), spec.num_layers + 1)


def add_recurrence(writer: "GGUFWriter", spec: LanguageModelSpec) -> None:
    """Add the hyperparameters of layers with linear attention."""
    linear = spec.linear_attention
    if isinstance(linear, ShortConvolutionSpec):
        writer.add_shortconv_l_cache(linear.conv_tokens)
    if isinstance(linear, GatedDeltaNetSpec):
        writer.add_ssm_conv_kernel(linear.conv_tokens)
        writer.add_ssm_inner_size(linear.num_value_heads * linear.value_dim)
        writer.add_ssm_state_size(linear.key_dim)
        writer.add_ssm_time_step_rank(linear.num_value_heads)
        writer.add_ssm_group_count(linear.num_key_heads)
        writer.add_full_attention_interval(_full_attention_interval(spec))
    if isinstance(linear, Mamba2Spec):
        writer.add_ssm_conv_kernel(linear.conv_tokens)
        writer.add_ssm_inner_size(linear.num_heads * linear.head_dim)
        writer.add_ssm_state_size(linear.state_dim)
        writer.add_ssm_time_step_rank(linear.num_heads)
        writer.add_ssm_group_count(linear.num_groups)

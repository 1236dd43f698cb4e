"""Nemotron-H and Nemotron 3 (arXiv 2504.03624, 2512.20848): layers of one part each, Mamba-2, attention without
positions, squared-ReLU experts or a dense feed-forward layer."""

from dataclasses import dataclass, replace
from typing import Any

from moe.interchange.families.decoder import mamba2
from moe.interchange.families.deepseek_v3 import MTP_KEYS
from moe.interchange.family import Family, Field, Fields, TensorRow, in_layers, transposed_row
from moe.interchange.fields import ExpertGroups, Heads, Key, Optional, always
from moe.interchange.reading import Reading
from moe.spec import LanguageModelSpec

_KINDS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
"""Type of layer by its letter in `hybrid_override_pattern`."""
_OLDER_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}
_DEFAULT_TYPES = ["linear_attention", "moe", "full_attention", "mlp"]


@dataclass(frozen=True)
class _Layers(Field):
    """Type of each layer, as a list of names or a text of letters."""

    keys = ("layers_block_type", "hybrid_override_pattern", "num_hidden_layers", "intermediate_size")

    def read(self, config: Reading) -> Fields:
        types = _types(config)
        if config.has("num_hidden_layers") and (number := config.get("num_hidden_layers", int)) != len(types):
            rule = f"must be {len(types)}, the number of types of layers"
            config.refuse("num_hidden_layers", number, rule, "correct config.json", code="mismatch")
        by_type = {kind: [layer for layer, name in enumerate(types) if name == kind] for kind in _KINDS.values()}
        fields: Fields = {
            "num_layers": len(types), "attention_layers": by_type["full_attention"],
            "feed_forward_layers": sorted(by_type["moe"] + by_type["mlp"]),
        }  # fmt: skip
        if by_type["mlp"]:
            fields["ffn_dim"] = config.get("intermediate_size", int)
        return fields | ({"dense_layers": by_type["mlp"]} if by_type["moe"] else {})

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        types = [_type_of(spec, layer) for layer in range(spec.num_layers)]
        letters = {kind: letter for letter, kind in _KINDS.items()}
        return {
            "layers_block_type": types, "hybrid_override_pattern": "".join(letters[kind] for kind in types),
            "num_hidden_layers": spec.num_layers, "intermediate_size": spec.ffn_dim or spec.model_dim,
        }  # fmt: skip


def _types(config: Reading) -> list[str]:
    """Types of layers, each one of `_KINDS`."""
    types, pattern = config.raw("layers_block_type"), config.raw("hybrid_override_pattern")
    key = "hybrid_override_pattern" if types is None and pattern is not None else "layers_block_type"
    if key == "hybrid_override_pattern":
        names = [_KINDS.get(letter) for letter in pattern] if isinstance(pattern, str) else []
    else:
        types = _DEFAULT_TYPES if types is None else types
        names = [_OLDER_NAMES.get(str(name), str(name)) for name in types] if isinstance(types, list) else []
    if not names or not set(names) <= set(_KINDS.values()):
        choices = _KINDS if key == "hybrid_override_pattern" else _KINDS.values()
        config.refuse(
            key, config.raw(key), f"must be of {', '.join(choices)}", "correct config.json", code="invalid_value"
        )
        return _DEFAULT_TYPES
    return [str(name) for name in names]


def _type_of(spec: LanguageModelSpec, layer: int) -> str:
    if spec.has_attention(layer):
        return "full_attention" if spec.has_full_attention(layer) else "linear_attention"
    return "moe" if layer in spec.moe_layers else "mlp"


@dataclass(frozen=True)
class _Experts(Field):
    """Keys that apply if a layer has experts."""

    fields: tuple[Field, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(key for field in self.fields for key in field.keys)

    def read(self, config: Reading) -> Fields:
        if "moe" not in _types(config):
            return {}
        return {path: value for field in self.fields for path, value in field.read(config).items()}

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        if spec.moe is None:
            return {}
        return {key: value for field in self.fields for key, value in field.write(spec).items()}


_ATTENTION = (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o"))
_MATRICES = (("w_in", "up"), ("w_out", "down"))
_MEMORY: tuple[TensorRow, ...] = (
    TensorRow("embedding.weight", "model.embeddings.weight"),
    TensorRow("norm.weight", "model.norm_f.weight"),
    TensorRow("output.weight", "lm_head.weight"),
    *in_layers(
        TensorRow("norm.weight", "norm.weight"),
        TensorRow("feed_forward.norm.weight", "norm.weight"),
        *(TensorRow(f"attention.{name}.weight", f"mixer.{letter}_proj.weight") for name, letter in _ATTENTION),
        *(TensorRow(f"feed_forward.dense.{name}.weight", f"mixer.{word}_proj.weight") for name, word in _MATRICES),
        transposed_row("feed_forward.moe.router", "mixer.gate.weight"),
        TensorRow("feed_forward.moe.router_bias", "mixer.gate.e_score_correction_bias"),
        transposed_row("feed_forward.moe.latent_in", "mixer.fc1_latent_proj.weight"),
        transposed_row("feed_forward.moe.latent_out", "mixer.fc2_latent_proj.weight"),
        TensorRow("feed_forward.moe.experts.w_in", "mixer.experts.up_proj", "e m h", "e h m"),
        TensorRow("feed_forward.moe.experts.w_out", "mixer.experts.down_proj", "e h m", "e m h"),
        *(transposed_row(f"feed_forward.moe.shared.{name}", f"mixer.shared_experts.{word}_proj.weight")
          for name, word in _MATRICES),
    ),
    *mamba2("mixer"),
)  # fmt: skip
"""Tensors in memory."""


def _as_on_hub(row: TensorRow) -> TensorRow:
    """The row on disk, under `backbone`, with one tensor per expert."""
    row = replace(row, tensor_name=row.tensor_name.replace("model.", "backbone.", 1))
    if ".experts." not in row.parameter_name:
        return row
    name = row.tensor_name.replace("experts.", "experts.{e}.") + ".weight"
    return replace(row, tensor_name=name, tensor_axes=str(row.tensor_axes).removeprefix("e "))


_WITHOUT_POSITIONS = "attention has no positions"
_INITIAL = "it concerns initial values"

NEMOTRON_H = Family(
    model_types=("nemotron_h",),
    architecture="NemotronHForCausalLM",
    defaults={
        "vocab_size": 131_072, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "tie_word_embeddings": False, "intermediate_size": 21_504, "layer_norm_epsilon": 1e-5,
        "ssm_state_size": 128,
        "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4, "time_step_min": 0.001,
        "use_conv_bias": True, "use_bias": False, "n_routed_experts": 8, "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688, "num_experts_per_tok": 2, "routed_scaling_factor": 1.0,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "moe_latent_size": None, "num_hidden_layers": None,
    },
    fields=(
        Key("vocab_size", "vocab_size"),
        Key("hidden_size", "model_dim"),
        Key("layer_norm_epsilon", "norm_eps", float),
        Key("tie_word_embeddings", "tie_embeddings", bool),
        _Layers(),
        Heads(head_dim=128),
        Key("mamba_num_heads", "linear_attention.num_heads"),
        Key("mamba_head_dim", "linear_attention.head_dim"),
        Key("n_groups", "linear_attention.num_groups"),
        Key("ssm_state_size", "linear_attention.state_dim"),
        Key("conv_kernel", "linear_attention.conv_tokens"),
        Key("use_conv_bias", "linear_attention.conv_bias", bool),
        Key("use_bias", "linear_attention.bias", bool),
        Key("time_step_min", "linear_attention.min_time_step", float),
        _Experts((
            Key("n_routed_experts", "moe.num_experts"),
            Key("num_experts_per_tok", "moe.top_k"),
            Key("moe_intermediate_size", "moe.hidden_dim"),
            Key("moe_shared_expert_intermediate_size", "moe.shared_hidden_dim"),
            Optional("moe_latent_size", "moe.latent_dim", int),
            ExpertGroups(),
            Key("norm_topk_prob", "moe.renormalize_gates", bool),
            Key("routed_scaling_factor", "moe.routed_scaling_factor", float),
            always(
                moe__router="sigmoid_topk", moe__selection_bias=True, moe__bias_update_rate=0.0,
                moe__aux_coefficient=0.0, moe__activation="relu2",
            ),
        )),
        always(attention__rope={"fraction": 0.0}, linear_attention__kind="mamba2", ffn_activation="relu2"),
    ),
    only={
        "mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,),
        "mamba_proj_bias": (False,), "tie_word_embeddings": (False,), "n_shared_experts": (1,),
        "residual_in_fp32": (False,), "sliding_window": (),
    },
    unused_keys={
        **MTP_KEYS,
        **dict.fromkeys(("mtp_layers_block_type", "mtp_hybrid_override_pattern"), MTP_KEYS["num_mtp_layers"]),
        **dict.fromkeys(
            ("max_position_embeddings", "rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor"),
            _WITHOUT_POSITIONS,
        ),
        **dict.fromkeys(("time_step_max", "time_step_floor", "rescale_prenorm_residual"), _INITIAL),
        "time_step_limit": "transformers bounds time steps by time_step_min alone",
        "norm_eps": "layer_norm_epsilon decides it",
        "expand": "the numbers and dimension of heads decide it",
        "chunk_size": "chunks do not change the result; ours have 64 positions",
        **dict.fromkeys(
            ("use_mamba_kernels", "mamba_ssm_cache_dtype", "num_logits_to_keep", "moe_shared_expert_overlap"),
            "it chooses another implementation",
        ),
    },
    aliases={
        "layer_types": "layers_block_type", "num_local_experts": "n_routed_experts", "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel", "mamba_expand": "expand", "mamba_dt_min": "time_step_min",
        "mamba_dt_max": "time_step_max", "mamba_dt_limit": "time_step_limit", "mamba_conv_bias": "use_conv_bias",
        "mamba_dt_init_floor": "time_step_floor", "mamba_chunk_size": "chunk_size",
    },
    tensors=tuple(map(_as_on_hub, _MEMORY)),
    fused_tensors=_MEMORY,
    mtp_pattern="mtp.",
    new_config_keys={"num_nextn_predict_layers": 0, "mlp_hidden_act": "relu2"},
)  # fmt: skip

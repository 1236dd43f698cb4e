"""GLM-5 (arXiv 2602.15763): sparse attention as in DeepSeek-V3.2, whose selections layers may share."""

from dataclasses import dataclass
from typing import Any

from moe.interchange.families.decoder import FUSED
from moe.interchange.families.deepseek_v2 import LATENT_UNUSED
from moe.interchange.families.deepseek_v3 import MTP_KEYS
from moe.interchange.families.deepseek_v32 import (
    SPARSE_ALIASES,
    SPARSE_CONSTANTS,
    SPARSE_FIELDS,
    SPARSE_ONLY,
    SPARSE_TENSORS,
)
from moe.interchange.family import Family, Field, Fields
from moe.interchange.fields import always
from moe.interchange.reading import Reading
from moe.spec import LanguageModelSpec

_FULL, _SHARED = "full", "shared"
_LETTERS = {"F": _FULL, "S": _SHARED}


@dataclass(frozen=True)
class SharedSelections(Field):
    """Layers that share an earlier layer's selection: in `indexer_types`, in a pattern of letters, or all but every
    `index_topk_freq`-th from `index_skip_topk_offset` on."""

    keys = ("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")

    def read(self, config: Reading) -> Fields:
        num_layers = config.get("num_hidden_layers", int) or 0
        key = next((name for name in self.keys[:2] if config.has(name)), None)
        types = self._by_frequency(config, num_layers) if key is None else config.raw(key)
        if isinstance(types, str):
            types = [_LETTERS.get(letter, letter) for letter in types]
        if not isinstance(types, list) or len(types) < num_layers or not set(map(str, types)) <= {_FULL, _SHARED}:
            rule = f"must be {num_layers} of {_FULL} and {_SHARED}"
            config.refuse(key or self.keys[0], None, rule, "correct config.json", code="invalid_value")
            types = []
        shared_layers = [layer for layer, layer_type in enumerate(types[:num_layers]) if layer_type == _SHARED]
        return {"attention.indexer.shared_layers": shared_layers}

    def _by_frequency(self, config: Reading, num_layers: int) -> list[str]:
        frequency = max(1, config.get("index_topk_freq", int, null=1) or 1)
        offset = config.get("index_skip_topk_offset", int, null=2) or 0
        return [_SHARED if max(layer - offset + 1, 0) % frequency else _FULL for layer in range(num_layers)]

    def write(self, spec: LanguageModelSpec) -> dict[str, Any]:
        return {"indexer_types": [_FULL if spec.has_indexer(layer) else _SHARED for layer in range(spec.num_layers)]}


GLM_MOE_DSA = Family(
    model_types=("glm_moe_dsa",),
    architecture="GlmMoeDsaForCausalLM",
    defaults={
        "vocab_size": 154_880, "hidden_size": 6144, "intermediate_size": 12_288, "moe_intermediate_size": 2048,
        "num_hidden_layers": 78, "num_attention_heads": 64, "n_shared_experts": 1, "n_routed_experts": 256,
        "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 2048, "qk_rope_head_dim": 64,
        "v_head_dim": 256, "qk_nope_head_dim": 192, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 8,
        "first_k_dense_replace": 3, "norm_topk_prob": True, "max_position_embeddings": 202_752, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "attention_bias": False, "index_topk": 2048, "index_head_dim": 128,
        "index_n_heads": 32, "index_topk_freq": 1, "index_skip_topk_offset": 2,
    },
    fields=(*SPARSE_FIELDS, SharedSelections(), always(attention__indexer__pairing="interleaved")),
    only={**SPARSE_ONLY, "indexer_rope_interleave": (True,)},
    unused_keys={
        **LATENT_UNUSED,
        **MTP_KEYS,
        "index_share_for_mtp_iteration": MTP_KEYS["num_nextn_predict_layers"],
        "moe_router_dtype": "routers are computed in float32 or wider",
    },
    aliases=SPARSE_ALIASES,
    tensors=SPARSE_TENSORS,
    fused_tensors=FUSED,
    mtp_pattern="model.layers.{beyond}.",
    new_config_keys={"num_nextn_predict_layers": 0},
    constant_keys={**SPARSE_CONSTANTS, "rope_interleave": True, "indexer_rope_interleave": True},
)  # fmt: skip

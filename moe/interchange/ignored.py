"""Keys of `config.json` that do not affect what a model computes here, with the reason for each. No torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from moe.interchange.reading import Reading, json_equal
from moe.spec import ProblemCode

BOOKKEEPING = frozenset({
    "model_type", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version",
    "quantization_config", "_name_or_path", "name_or_path", "_commit_hash", "use_cache", "initializer_range",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "unk_token_id",
    "mask_token_id", "eod_token_id", "use_return_dict", "return_dict", "output_attentions", "output_hidden_states",
    "torchscript", "use_bfloat16", "tf_legacy_loss", "chunk_size_feed_forward", "id2label", "label2id",
    "num_labels", "problem_type", "finetuning_task", "tokenizer_class", "prefix", "task_specific_params",
    "tie_encoder_decoder", "cross_attention_hidden_size", "is_decoder", "_attn_implementation",
    "attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal",
    "_experts_implementation", "experts_implementation", "tie_last_hidden_states", "use_flash_attn", "use_sdpa",
    "transformers.js_config",
})  # fmt: skip
"""Keys that are read elsewhere (tokens, dtypes, weight formats), or configure code that does not run here. Exports keep
them; users get no note."""

GENERATION = frozenset({
    "max_length", "min_length", "max_new_tokens", "min_new_tokens", "do_sample", "early_stopping", "num_beams",
    "num_beam_groups", "temperature", "top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "repetition_penalty", "encoder_repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores", "output_logits",
    "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "diversity_penalty", "max_time",
    "stop_strings", "penalty_alpha", "renormalize_logits", "sequence_bias", "guidance_scale", "low_memory",
    "token_healing", "watermarking_config", "cache_implementation", "cache_config", "return_legacy_cache",
    "prefill_chunk_size", "compile_config", "disable_compile", "use_model_defaults", "is_assistant",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "prompt_lookup_num_tokens",
    "max_matching_ngram_size", "constraints", "force_words_ids", "dola_layers", "continuous_batching_config",
    "max_cache_len", "assistant_ensemble_weight", "speculation_type", "use_mtp", "_from_model_config",
})  # fmt: skip
"""Generation settings, which transformers 4 kept in this file and 5 omits. Exports keep them."""

_LENGTH = "positions are not limited here; data.max_tokens limits sequences"
_TRAINER = "another trainer's note"
_MEMORY = "the plan decides recomputation"
_LOSS = "another trainer's loss; moe.aux_coefficient and moe.z_coefficient set this one's"
_TOKENIZER = "the tokenizer's files decide it, and no layout depends on the side of padding"
_DROPOUT = "attention has no dropout here"

REASONS: Mapping[str, str] = {
    "attention_dropout": _DROPOUT,
    "output_router_logits": "transformers' loss over all layers together; moe.aux_coefficient sets this one's",
    "router_aux_loss_coef": _LOSS, "router_z_loss_coef": _LOSS, "aux_loss_alpha": _LOSS, "seq_aux": _LOSS,
    "aux_loss_coef": _LOSS, "z_loss_coef": _LOSS,
    "unsloth_version": _TRAINER, "unsloth_fixed": _TRAINER, "unsloth_tiled_mlp": _TRAINER,
    "neftune_noise_alpha": "no noise is added to embeddings here",
    "gradient_checkpointing": _MEMORY, "gradient_checkpointing_kwargs": _MEMORY, "use_reentrant": _MEMORY,
    "max_sequence_length": _LENGTH, "max_seq_length": _LENGTH, "max_seq_len": _LENGTH, "seq_length": _LENGTH,
    "seq_len": _LENGTH, "n_ctx": _LENGTH, "model_max_length": _LENGTH, "tokenizer_model_max_length": _LENGTH,
    "max_model_len": _LENGTH,
    "tokenizer_padding_side": _TOKENIZER, "padding_side": _TOKENIZER, "tokenizer_truncation_side": _TOKENIZER,
    "bos_token": _TOKENIZER, "eos_token": _TOKENIZER, "pad_token": _TOKENIZER, "unk_token": _TOKENIZER,
    "classifier_dropout": "there is no classifier", "score_bias": "there is no classifier",
    "pretraining_tp": "another library's split of products; the plan decides it here",
    "ep_size": "another library's split of experts; the plan decides it here",
    "license": "its author's note", "license_name": "its author's note", "model_name": "its author's note",
    "base_model": "its author's note", "base_model_name_or_path": "its author's note",
}  # fmt: skip
"""Keys whose value does not matter here, each with the reason."""

_OFF: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attention_dropout", "classifier_dropout", "neftune_noise_alpha"), (0,)),
    **dict.fromkeys(("output_router_logits", "gradient_checkpointing", "use_reentrant"), (False,)),
    **dict.fromkeys(("pretraining_tp", "ep_size"), (1,)),
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules"), (0,)),
    "use_mtp": (False,),
    "input_jitter_noise": (0,),
}
"""Values of ignored keys that need no note."""

FIXED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "position_embedding_type": ("rope", "rotary"),
    "use_mrope": (False,),
    "rope_interleaved": (False,),
    "use_sliding_window": (False,),
    "use_dual_chunk_attention": (False,),
    "mlp_bias": (False,),
    "use_parallel_residual": (False,),
    "is_causal": (True,),
    "causal": (True,),
    "hidden_dropout": (0,), "hidden_dropout_prob": (0,), "attention_probs_dropout_prob": (0,), "resid_pdrop": (0,),
    "embd_pdrop": (0,), "attn_pdrop": (0,), "residual_dropout": (0,), "expert_dropout": (0,),
    "router_jitter_noise": (0,), "jitter_noise": (0,),
    "normalization": ("rmsnorm", "RMSNorm"), "norm_type": ("rmsnorm", "rms_norm", "RMSNorm"),
}  # fmt: skip
"""Values that hold for every family that does not read the key; other values are refused."""


def explain_ignored_keys(config: Mapping[str, Any], reasons: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each config key that does not affect the computation, with the reason."""
    for key in sorted(config.keys() & reasons.keys()):
        value = config[key]
        if value is not None and not _is_off(key, value):
            yield f"{key}={_short(value)}: {reasons[key]}"


def check_dropout(reading: Reading) -> None:
    """Report an `attention_dropout` that is not a probability below 1."""
    value = reading.raw("attention_dropout")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1):
        code: ProblemCode = "out_of_range" if type(value) in (int, float) else "wrong_type"
        rule = "must be a number from 0 to below 1"
        reading.refuse("attention_dropout", value, rule, "correct config.json", code=code)


def _is_off(key: str, value: Any) -> bool:
    """Whether a key has the same meaning as if it were missing: off, or one device."""
    return any(json_equal(value, off_value) for off_value in _OFF.get(key, ()))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."

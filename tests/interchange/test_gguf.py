"""GGUF files: read back by gguf, loaded by transformers, and run by llama.cpp itself."""

import json
import random
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe.export.gguf_file import save_checkpoint_as_gguf
from moe.export.hub import save_checkpoint_as_folder
from moe.interchange.gguf import word_patterns
from moe.interchange.gguf.architecture import ARCHITECTURES
from moe.interchange.gguf.matrix_type import GgufType
from moe.interchange.gguf.save import save_gguf
from moe.interchange.load import load_weights
from moe.interchange.origin import Origin
from moe.interchange.sources import ModelSource
from moe.spec import JobSpec
from moe.train.checkpoint.checkpointer import CheckpointError
from tests.interchange import llama_cpp, tiny
from tests.interchange.test_jobs import further, stored_in, with_adapter
from tests.refusals import expect_problem
from tests.service_cli.command import check_refused, output_of
from tests.unit.language_runs import documents, language_job
from tests.unit.train_runs import run

SIZES = {"vocab_size": 320, "hidden_size": 64}
FULL = {"layer_types": ["full_attention"] * 3, "sliding_window": None}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "beta_fast": 16.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 32}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None, "rope_parameters": YARN},
    "mixtral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4,
                                                              "factor": 4.0}},
    "qwen3": {"use_sliding_window": False},
    "qwen2_moe": {"use_sliding_window": False, "mlp_only_layers": []},
    "qwen3_moe": {"decoder_sparse_step": 1, "attention_bias": False, "rope_parameters": YARN},
    "olmoe": {"clip_qkv": None, "num_key_value_heads": 4},
    "gpt_oss": {"rope_parameters": {**YARN, "truncate": True}},
    "deepseek_v2": {"attention_bias": False, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
                    "q_lora_rank": None, "num_hidden_layers": 27},
    "deepseek_v3": {"n_routed_experts": 8},
    "dots1": {**FULL, "num_key_value_heads": 4},
    "lfm2_moe": {"conv_bias": False},
    "qwen3_next": {"linear_value_head_dim": 6},
    "qwen3_5_moe_text": {"linear_value_head_dim": 6, "attention_bias": False},
    "granitemoehybrid": {"position_embedding_type": "nope", "hidden_size": 96, "mamba_proj_bias": False,
                         "mamba_d_state": 16},
    "nemotron_h": {"mamba_head_dim": 8, "ssm_state_size": 16, "moe_latent_size": 12,
                   "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"]},
    "bailing_moe_v2": {"head_dim": 16},
    "gemma3_text": {"query_pre_attn_scalar": 8, "num_hidden_layers": 7,
                    "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]},
    "llama4_text": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "moe_layers": [1, 3],
                    "attention_chunk_size": 8192, "floor_scale": 8192, "num_experts_per_tok": 2},
    "gemma4_text": {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "exaone_moe": {"num_hidden_layers": 4, "layer_types": [*["sliding_attention"] * 3, "full_attention"],
                   "mlp_layer_types": ["dense", *["sparse"] * 3]},
}  # fmt: skip
"""What makes the tiny models of `tiny.CONFIGS` such as llama.cpp computes."""
PHIMOE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
TOLERANCES = {"gemma3_text": 2e-3, "gemma4_text": 2e-3}
"""Of the largest logit, where llama.cpp computes a function by a table: GELU in float16."""
LOADED = ("llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "minimax_m2")
"""Families whose GGUF files transformers loads."""
TEXTS = ["Hello, World! It's 12345 o'clock.\n\n  def f(x):\n\treturn x<bos>", "ÄÖÜ naïve Ça日本語テスト 한국어 🚀🌫️ मैंने",
         "a  b   c \r\n\r\n--==>> I'LL we'Ve 3.14159/x_y"]  # fmt: skip


def tokenizer_of(patterns: Sequence[str], *, ignore_merges: bool = False) -> Tokenizer:
    """Byte-level BPE that splits texts by these patterns and begins them with <bos>."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=SIZES["vocab_size"], special_tokens=["<bos>", "<eos>"], initial_alphabet=alphabet,
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator([Path(__file__).read_text(), *TEXTS], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return tokenizer


def folder_of(family: str, path: Path, tokenizer: Tokenizer, **changes: Any) -> Path:
    """A tiny model with its tokenizer, in float32."""
    fields = {**SIZES, **CHANGES.get(family, {}), "bos_token_id": 0, "eos_token_id": 1, **changes}
    model = tiny.their_model(family, **fields)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point():
                tensor.mul_(0.3).add_(1 if "norm" in name else 0)
    tiny.folder_of(model, path, dtype=torch.float32)
    (path / "tokenizer.json").write_text(tokenizer.to_str())
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>",
                                                            "chat_template": "{{ messages }}"}))  # fmt: skip
    return path


def write(folder: Path, target: Path, type: GgufType = GgufType.F32) -> Path:
    """The folder's model as a GGUF file."""
    spec = tiny.spec_of(tiny.config_of(folder))
    model = tiny.blank(spec)
    load_weights(str(folder), model, spec)
    save_gguf(spec, ModelSource(model), target, name="tiny", type=type, origin=Origin.of_folder(str(folder), spec))
    return target


def logits_of(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(torch.tensor([ids])).logits[0]
    return logits


def tensors_of(file: Path) -> dict[str, Any]:
    """Tensors of a file, dequantized, by name."""
    return {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(file).tensors}


IDS = random.Random(1).choices(range(5, 300), k=24)


@pytest.fixture(scope="module")
def folder_with_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder of a family, and beside it its file, `FAMILY.gguf`."""
    path, tokenizer = tmp_path_factory.mktemp("gguf"), tokenizer_of([word_patterns.LLAMA3])

    @cache
    def make(family: str) -> Path:
        folder = folder_of(family, path / family, tokenizer)
        write(folder, path / f"{family}.gguf")
        return folder

    return make


FAST = ("qwen3_moe", "deepseek_v3", "lfm2_moe")


@pytest.mark.parametrize(
    "families", [FAST, pytest.param(tuple(ARCHITECTURES.keys() - set(FAST)), marks=pytest.mark.slow)]
)
def test_llama_cpp_computes_each_family(folder_with_file: Callable[[str], Path], families: tuple[str, ...]) -> None:
    """In float32, to a tolerance; tensors have the names that gguf knows."""
    architectures = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    files = [folder_with_file(family).with_suffix(".gguf") for family in families]
    answers = llama_cpp.ask([{"file": file, "ids": IDS} for file in files])
    for family, file, answer in zip(families, files, answers, strict=True):
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
        logits = logits_of(AutoModelForCausalLM.from_pretrained(file.with_suffix(""), **options), IDS)
        difference = (torch.tensor(answer) - logits).abs().max() / logits.abs().max()
        assert difference < TOLERANCES.get(family, 1e-4), f"{family}: {difference}"
        key = architectures[ARCHITECTURES[family].name]
        patterns = [gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[key]]
        known_names = {pattern.format(bid=layer) for pattern in patterns for layer in range(27)}
        assert {re.sub(r"\.(weight|bias|scale)$", "", name) for name in tensors_of(file)} <= known_names, family


VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama4_text", {"moe_layers": [0, 1, 2, 3], "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
        "original_max_position_embeddings": 32}}),
    ("llama4_text", {"num_local_experts": 128, "use_qk_norm": False}),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_llama_cpp_computes_variants_of_a_family(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    """Experts in all layers and Llama 3.1's RoPE; no norms of queries."""
    folder = folder_of(family, tmp_path / family, tokenizer_of([word_patterns.LLAMA3]), **changes)
    (answer,) = llama_cpp.ask([{"file": write(folder, tmp_path / "variant.gguf"), "ids": IDS}])
    logits = logits_of(AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager"), IDS)
    assert (torch.tensor(answer) - logits).abs().max() < 1e-4 * logits.abs().max()


DENSE_GEMMA = {"enable_moe_block": False, "attention_k_eq_v": False, "num_global_key_value_heads": None,
               "final_logit_softcapping": None}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"), [("gemma3_text", {}), ("gemma4_text", {}), ("gemma4_text", DENSE_GEMMA)]
)
def test_all_but_gelu_of_gemma_is_computed_to_a_millionth(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    folder = folder_of(family, tmp_path / "gemma", tokenizer_of([word_patterns.LLAMA3]), **changes)
    tensors = tiny.tensors_of(folder)
    for name in tensors:
        if "down_proj" in name:
            tensors[name].zero_()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (answer,) = llama_cpp.ask([{"file": write(folder, tmp_path / "gemma.gguf"), "ids": IDS}])
    logits = logits_of(AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager"), IDS)
    assert (torch.tensor(answer) - logits).abs().max() < 1e-5 * logits.abs().max()


@pytest.mark.parametrize(
    "family", [family if family in FAST else pytest.param(family, marks=pytest.mark.slow) for family in LOADED]
)
def test_transformers_loads_the_same_model(folder_with_file: Callable[[str], Path], family: str) -> None:
    folder = folder_with_file(family)
    # its loader keeps neither the scaling of RoPE nor that Llama has biases: those come from the folder's config
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    expected = AutoModelForCausalLM.from_pretrained(folder, **options)
    loaded = AutoModelForCausalLM.from_pretrained(
        folder.parent, gguf_file=f"{family}.gguf", config=expected.config, **options
    )
    tensors = dict(loaded.state_dict())
    for name, tensor in expected.state_dict().items():
        assert torch.equal(tensors[name], tensor), name
    torch.testing.assert_close(logits_of(loaded, IDS), logits_of(expected, IDS), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("type", [GgufType.F16, GgufType.BF16, GgufType.Q8_0])
def test_matrices_are_those_that_gguf_quantizes(
    folder_with_file: Callable[[str], Path], tmp_path: Path, type: GgufType
) -> None:
    file = write(folder_with_file("deepseek_v3"), tmp_path / "new.gguf", type)
    wide_tensors = tensors_of(folder_with_file("deepseek_v3").with_suffix(".gguf"))
    types = set()
    for tensor in gguf.GGUFReader(file).tensors:
        types.add(tensor.tensor_type.name)
        expected = gguf.quantize(wide_tensors[tensor.name], tensor.tensor_type)
        assert np.array_equal(tensor.data.view(np.uint8), expected.view(np.uint8)), tensor.name
        is_wide = len(tensor.shape) == 1 or "ffn_gate_inp" in tensor.name
        has_blocks = type is not GgufType.Q8_0 or tensor.shape[0] % 32 == 0
        assert tensor.tensor_type.name == ("F32" if is_wide else type.name if has_blocks else "F16"), tensor.name
    assert type.name in types
    (answer,) = llama_cpp.ask([{"file": file, "ids": IDS}])
    assert torch.tensor(answer).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("patterns", word_patterns.PATTERNS, ids=lambda key: word_patterns.PATTERNS[key][0].name)
def test_llama_cpp_encodes_texts_alike(tmp_path: Path, patterns: tuple[str, ...]) -> None:
    choices = word_patterns.PATTERNS[patterns]
    characters, chance = "aB'sRE 12\n\r\t.-/_éß漢字कि́🚀", random.Random(0)
    texts = [*TEXTS, *("".join(chance.choices(characters, k=30)) for _ in range(60))]
    requests, expected = [], []
    for choice in choices:
        tokenizer = tokenizer_of(patterns, ignore_merges=choice.ignores_merges)
        folder = folder_of("qwen3", tmp_path / choice.name, tokenizer, num_hidden_layers=1)
        requests.append({"file": write(folder, tmp_path / f"{choice.name}.gguf"), "texts": texts})
        expected.append([encoding.ids for encoding in tokenizer.encode_batch(texts)])
        fields = gguf.GGUFReader(tmp_path / f"{choice.name}.gguf").fields
        assert fields["tokenizer.ggml.pre"].contents() == choice.name
        assert fields["tokenizer.chat_template"].contents() == "{{ messages }}"
    assert llama_cpp.ask(requests) == expected


def test_transformers_loads_the_same_tokenizer(folder_with_file: Callable[[str], Path]) -> None:
    folder = folder_with_file("qwen3_moe")
    loaded = AutoTokenizer.from_pretrained(folder.parent, gguf_file="qwen3_moe.gguf")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert (loaded.bos_token, loaded.eos_token) == ("<bos>", "<eos>")
    assert loaded("Hello World", add_special_tokens=False) == tokenizer("Hello World", add_special_tokens=False)


@pytest.mark.parametrize(("family", "changes", "path"), [
    ("phimoe", PHIMOE, "model_type"),
    pytest.param("qwen3_next", {"linear_value_head_dim": 5}, "model.linear_attention.value_dim",
                 marks=pytest.mark.slow),
    pytest.param("nemotron_h", {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"]},
                 "model.layers with experts", marks=pytest.mark.slow),
    ("mixtral", {"sliding_window": 16}, "model.attention.window"),
    pytest.param("gemma3_text", {"layer_types": ["sliding_attention"] * 7}, "model.attention.window",
                 marks=pytest.mark.slow),
    pytest.param("llama4_text", {"attention_chunk_size": 16}, "model.attention.window", marks=pytest.mark.slow),
    pytest.param("llama4_text", {"use_qk_norm": False}, "model.local_attention.query_key_norm",
                 marks=pytest.mark.slow),
    pytest.param("llama4_text", {"moe_layers": [0, 3]}, "model.layers with experts", marks=pytest.mark.slow),
    pytest.param("bailing_moe_v2", {"head_dim": 8}, "model.attention.head_dim", marks=pytest.mark.slow),
    pytest.param("lfm2_moe", {"conv_bias": True}, "model.linear_attention.bias", marks=pytest.mark.slow),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "model.layers with experts"),
    ("qwen3_moe", {"norm_topk_prob": False}, "model.moe.renormalize_gates"),
    pytest.param("qwen2_moe", {"qkv_bias": False}, "model.attention.bias", marks=pytest.mark.slow),
    pytest.param("olmoe", {"clip_qkv": 8.0}, "model.attention.clip", marks=pytest.mark.slow),
    pytest.param("deepseek_v2", {"n_group": 2, "topk_method": "group_limited_greedy"},
                 "model.moe.num_expert_groups", marks=pytest.mark.slow),
    pytest.param("deepseek_v3", {"q_lora_rank": None}, "model.attention.query_rank", marks=pytest.mark.slow),
    ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}},
     "model.attention.rope.scaling.mscale"),
    ("qwen3", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
     "model.attention.rope.scaling.kind"),
])  # fmt: skip
def test_what_llama_cpp_computes_differently_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], path: str
) -> None:
    folder = folder_of(family, tmp_path / family, tokenizer_of([word_patterns.LLAMA3]), **changes)
    with expect_problem("unsupported", path):
        write(folder, tmp_path / "new.gguf")
    assert not list(tmp_path.glob("*.gguf*"))


def _with_normalizer(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Lowercase()


def _with_stripping_token(tokenizer: Tokenizer) -> None:
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])


def _with_words(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()


def _with_prefix(tokenizer: Tokenizer) -> None:
    tokens = [("<bos>", 0), ("<eos>", 1)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<eos> <bos> $A", special_tokens=tokens)


def _without_text(tokenizer: Tokenizer) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos>", special_tokens=[("<bos>", 0)])


def test_further_tokens_that_end_a_text_are_those_of_a_turn_and_of_a_message(tmp_path: Path) -> None:
    folder = folder_of("qwen3", tmp_path / "qwen3", tokenizer_of([word_patterns.LLAMA3]), num_hidden_layers=1)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7, 9]}))
    fields = gguf.GGUFReader(write(folder, tmp_path / "new.gguf")).fields
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    assert [fields[f"tokenizer.ggml.{name}"].contents() for name in names] == [1, 7, 9]


@pytest.mark.parametrize(("change", "path"), [
    (_with_normalizer, "tokenizer.json:normalizer"),
    (_with_stripping_token, "tokenizer.json:added_tokens.lstrip"),
    (_with_words, "tokenizer.json:pre_tokenizer"),
    (_with_prefix, "tokenizer.json:post_processor"),
    (_without_text, "tokenizer.json:post_processor"),
])  # fmt: skip
def test_what_llama_cpp_encodes_differently_is_refused(tmp_path: Path, change: Any, path: str) -> None:
    tokenizer = tokenizer_of([word_patterns.LLAMA3])
    change(tokenizer)
    folder = folder_of("qwen3", tmp_path / "qwen3", tokenizer, vocab_size=330)
    with expect_problem("unsupported", path):
        write(folder, tmp_path / "new.gguf")


def test_a_value_beyond_float16_is_refused_and_no_file_stays(tmp_path: Path) -> None:
    folder = folder_of("qwen3", tmp_path / "qwen3", tokenizer_of([word_patterns.LLAMA3]))
    tensors = tiny.tensors_of(folder)
    tensors["model.layers.0.mlp.down_proj.weight"][3, 3] = 1e5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with expect_problem("out_of_range", "blk.0.ffn_down.weight"):
        write(folder, tmp_path / "new.gguf", GgufType.F16)
    assert not list(tmp_path.glob(".*"))
    assert not (tmp_path / "new.gguf").exists()
    write(folder, tmp_path / "new.gguf")
    with expect_problem("already_exists", "target"):
        write(folder, tmp_path / "new.gguf")


@pytest.mark.slow
def test_a_job_with_an_adapter_is_exported_merged(tmp_path: Path) -> None:
    """The file of a run's checkpoint has the tensors of its Hugging Face export: of the weights, and of their
    averages."""
    folder = folder_of("qwen3_moe", tmp_path / "hub", tokenizer_of([word_patterns.LLAMA3]))
    spec = with_adapter(further(folder, tmp_path, 2), rank=2, targets=["*.attention.*", "*.experts.*"])
    fields = spec.model_dump(mode="json")
    spec = JobSpec.parse({**fields, "train": {**fields["train"], "ema_decay": 0.5}})
    run(spec, tmp_path / "storage", tmp_path / "cache")
    checkpoint = stored_in(tmp_path / "storage", 2)
    with pytest.raises(CheckpointError, match="--merge"):
        save_checkpoint_as_gguf(str(checkpoint), tmp_path / "adapter.gguf")
    exports = []
    for name in ("weights", "averages"):
        options = ("--ema",) if name == "averages" else ()
        target = tmp_path / name
        save_checkpoint_as_folder(str(checkpoint), target, merge=True, use_ema=bool(options))
        output = output_of("export", checkpoint, target / "tiny.gguf", "--format", "gguf", "--merge", *options)
        assert "tiny.gguf (" in output
        expected = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        loaded = AutoModelForCausalLM.from_pretrained(
            target, gguf_file="tiny.gguf", config=expected.config, dtype=torch.float32
        )
        assert all(torch.equal(loaded.state_dict()[key], tensor) for key, tensor in expected.state_dict().items())
        exports.append(tensors_of(target / "tiny.gguf"))
    assert not np.array_equal(*(tensors["blk.0.ffn_up_exps.weight"] for tensors in exports))
    before = tiny.tensors_of(folder)["model.layers.0.mlp.experts.0.up_proj.weight"].numpy()
    assert not np.array_equal(exports[0]["blk.0.ffn_up_exps.weight"][0], before)


@pytest.mark.slow
def test_a_model_from_scratch_is_refused_by_its_tokenizer(tmp_path: Path) -> None:
    """The way in which tokenizers trained here split texts has no name in llama.cpp; the model's architecture has."""
    moe = {"renormalize_gates": True, "activation": "swiglu"}
    model = {"ffn_dim": None, "attention": {"kind": "grouped_query", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}}
    base = language_job(documents(tmp_path / "data"), num_steps=2).model_dump(mode="json")
    fields = {**base["model"], **model, "moe": {**base["model"]["moe"], **moe}}
    run(JobSpec.parse({**base, "model": fields}), tmp_path / "storage", tmp_path / "cache")
    with expect_problem("unsupported", "tokenizer.json:pre_tokenizer"):
        save_checkpoint_as_gguf(str(stored_in(tmp_path / "storage", 2)), tmp_path / "new")
    check_refused("--outtype requires --format gguf", "export", tmp_path, tmp_path / "new", "--outtype", "f16")

"""Keys of published folders, and of trainers' folders, that do not change the computation."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import GenerationConfig

from moe.interchange.config import describe_config, known_keys
from moe.interchange.expand import expand, expand_model
from moe.interchange.families import FAMILIES
from moe.plan import Cluster, plan_on_cluster
from moe.spec import JobSpec
from service.cli.view.verdict import short_plan_view
from tests.interchange import tiny
from tests.refusals import expect_problem

HARMLESS: list[tuple[str, dict[str, Any]]] = [
    ("granitemoe", {"position_embedding_type": "rope"}),
    ("granitemoe", {"attention_dropout": 0.1}),
    ("llama", {"unsloth_version": "2026.4.2"}),
    ("llama", {"max_sequence_length": 2048}),
    ("qwen3", {"use_mrope": False}),
    ("llama", {"tokenizer_padding_side": "left"}),
    ("llama", {"neftune_noise_alpha": 5.0}),
    ("llama", {"model_max_length": 4096}),
    ("llama", {"gradient_checkpointing": True}),
    ("olmoe", {"attention_bias": None}),
    ("qwen3_moe", {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}),
    ("olmoe", {"output_router_logits": True}),
    ("llama", {"transformers.js_config": {"dtype": "q4"}}),
    ("deepseek_v3", {"layer_types": ["full_attention"] * 3}),
    ("hunyuan_v1_moe", {"moe_topk": [2, 2, 2], "moe_intermediate_size": [12, 12, 12], "attention_head_dim": 8}),
    ("bailing_moe_v2", {"model_type": "bailing_moe", "architectures": ["BailingMoeV2ForCausalLM"]}),
    ("bailing_moe", {"architectures": ["BailingMoeForCausalLM"], "output_dropout": 0.1, "max_window_layers": 28}),
    ("minimax_m2", {"attn_type_list": [1, 1, 1]}),
]


@pytest.mark.parametrize(("family", "keys"), HARMLESS)
def test_keys_that_change_nothing_are_accepted(family: str, keys: dict[str, Any]):
    plain = tiny.config_of_family(family) | ({"attention_bias": False} if "attention_bias" in keys else {})
    assert describe_config({**plain, **keys}, "c").model_fields == describe_config(plain, "c").model_fields


def test_keys_of_generation_that_a_config_may_have_are_known():
    config_keys = GenerationConfig().to_dict().keys()
    assert not [key for key in config_keys if any(key not in known_keys(family) for family in FAMILIES)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = tiny.config_of_family("olmoe", attention_dropout=0.1, output_router_logits=True)
    (tmp_path / "config.json").write_text(json.dumps({**config, "unsloth_version": "2026.4.2"}))
    return tmp_path


def job(folder: Path, **moe: Any) -> dict[str, Any]:
    return {
        "name": "t", "model": {"from": str(folder), "moe": {"group_tokens": 64, **moe}},
        "data": {"corpus": "synthetic", "max_tokens": 64}, "train": {"num_steps": 1, "batch_tokens": 128},
    }  # fmt: skip


def test_a_loss_of_routers_needs_a_coefficient_of_the_job(folder: Path):
    with expect_problem("unsupported", f"{folder}/config.json:output_router_logits"):
        expand(job(folder), None)
    expand_model({"from": str(folder)}, None)  # which nothing trains
    for coefficient in (0.0, 0.01):
        spec = JobSpec.parse(expand(job(folder, aux_coefficient=coefficient), None))
        assert spec.model.moe.aux_coefficient == coefficient


def test_a_plan_tells_what_was_ignored(folder: Path):
    spec = JobSpec.parse(expand(job(folder, aux_coefficient=0.01), None))
    plan = plan_on_cluster(spec, Cluster(num_nodes=1, devices_per_node=1, device="cpu", memory_bytes=8 * 1024**3))
    (line,) = (reason for reason in plan.reasons if reason.startswith("ignored config.json keys: "))
    screen = StringIO()
    Console(file=screen, width=1000).print(short_plan_view(plan, "1 node"))
    (screen_line,) = (row for row in screen.getvalue().splitlines() if row.startswith("ignored "))
    for key in ("attention_dropout=0.1", "output_router_logits=True", "unsloth_version='2026.4.2'"):
        assert key in line
        assert key in screen_line

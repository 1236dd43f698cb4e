"""Every field of the config that PEFT writes is obeyed, without effect or refused, and documented so."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from moe.interchange.adapter_fields import IRRELEVANT, OBEYED, REFUSED
from tests.interchange import tiny
from tests.interchange.test_adapter_folders import adapter_beside, beginning_as
from tests.refusals import expect_problem

DOCS = Path(__file__).parents[2] / "docs" / "adapters.md"
OTHER_VALUES: dict[str, Any] = {
    "bias": "all", "fan_in_fan_out": True, "lora_bias": True, "layer_replication": [[0, 1]],
    "megatron_config": {"a": 1}, "alora_invocation_tokens": [3], "use_qalora": True, "velora_config": {"a": 1},
    "kasa_config": {"beta": 1.0}, "arrow_config": {"a": 1}, "use_bdlora": {"a": 1}, "monteclora_config": {"a": 1},
}  # fmt: skip
UNRELATED: dict[str, Any] = {
    "target_modules": "other", "exclude_modules": ["q_proj"], "layers_to_transform": [7], "layers_pattern": "h",
    "base_model_name_or_path": "some/base", "revision": "main", "loftq_config": {"loftq_bits": 4},
    "eva_config": {"rho": 2.0}, "corda_config": {"a": 1}, "lora_ga_config": {"a": 1}, "task_type": "SEQ_CLS",
    "auto_mapping": {"a": 1}, "peft_version": "9", "inference_mode": False, "ensure_weight_tying": True,
    "megatron_core": "megatron.core", "qalora_group_size": 8, "runtime_config": {"a": 1}, "merge_weights": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def mixtral_adapter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(base, adapter of its queries)"""
    folder = tmp_path_factory.mktemp("mixtral")
    base = tiny.folder_of(tiny.their_model("mixtral"), folder / "base")
    adapter_beside(base, folder / "adapter", {"rank": 2, "targets": ["*.query.*"]})
    return base, folder / "adapter"


def test_every_field_of_peft_is_in_one_table() -> None:
    """A field that a later PEFT adds fails here until it is understood."""
    import peft  # takes seconds, in each process that collects this file

    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert fields <= {*OBEYED, *IRRELEVANT, *REFUSED}
    assert len({*OBEYED, *IRRELEVANT, *REFUSED}) == len(OBEYED) + len(IRRELEVANT) + len(REFUSED)
    defaults = peft.LoraConfig()
    assert all(getattr(defaults, name) == accepted for name, (accepted, _) in REFUSED.items())
    assert OTHER_VALUES.keys() == REFUSED.keys()
    assert UNRELATED.keys() == IRRELEVANT.keys()


def test_the_tables_are_documented() -> None:
    rows = re.findall(r"^\| (.+?) \| (obeyed|no effect|refused)", DOCS.read_text(), re.MULTILINE)
    statuses = {name: status for names, status in rows for name in re.findall(r"`(\w+)`", names)}
    assert statuses == {
        **dict.fromkeys(OBEYED, "obeyed"), **dict.fromkeys(IRRELEVANT, "no effect"),
        **dict.fromkeys(REFUSED, "refused"),
    }  # fmt: skip


def with_fields(adapter: Path, folder: Path, **fields: Any) -> Path:
    config = shutil.copytree(adapter, folder) / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **fields}))
    return config


@pytest.mark.sample(4)
@pytest.mark.parametrize("field", [*OTHER_VALUES, "mica", "pissa_niter_4", "corda", "loftq", "lora_ga"])
def test_fields_that_change_the_computation_are_refused(mixtral_adapter, tmp_path: Path, field: str) -> None:
    base, adapter = mixtral_adapter
    name, value = (field, OTHER_VALUES[field]) if field in OTHER_VALUES else ("init_lora_weights", field)
    config = with_fields(adapter, tmp_path / "adapter", **{name: value})
    with expect_problem("unsupported", f"{config}:{name}"):
        beginning_as(base, config.parent)


def test_fields_without_effect_change_nothing(mixtral_adapter, tmp_path: Path) -> None:
    base, adapter = mixtral_adapter
    config = with_fields(adapter, tmp_path / "adapter", **UNRELATED, init_lora_weights="eva")
    spec, expected = (beginning_as(base, folder).adapter for folder in (config.parent, adapter))
    same = {"from_folder": None, "from_config": None}
    assert spec.model_copy(update=same) == expected.model_copy(update=same)

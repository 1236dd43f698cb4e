"""Published chat templates, from the package that ships them."""

from functools import cache
from importlib.metadata import distribution
from pathlib import Path

TEMPLATES = {
    "qwen2_5": True, "qwen3": True, "qwen3_instruct_2507": True, "qwen3_5_think": True, "qwen3_5_nothink": True,
    "qwen3_6": True, "qwen3_8": True, "gptoss": True, "glm4moe": True, "llama3_1": True, "llama3_2": True,
    "lfm2_2_5": True, "lfm2_2_5_v2": True, "nemotron_3_nano": True, "nemotron_3_super": True,
    "nemotron_3_ultra": True, "nemotron_3_5_lightning": True, "gemma4": True, "gemma4_v5": True, "muse_glimmer": True,
    "qwen3_vl": True, "deepseekv3": False, "deepseek_r1_distill": False, "llama3": False, "lfm2": False,
    "phi3": False, "phi3_5": False, "cohere": False, "cohere2": False, "gemma3": False, "smolvlm": False,
}  # fmt: skip
"""Names of templates, and whether they write calls of tools at every place. Those of LFM2.5 have generation marks."""


@cache
def read_template(name: str) -> str:
    """The source of a template."""
    path = distribution("trl").locate_file(f"trl/chat_templates/{name}.jinja")
    return Path(str(path)).read_text()

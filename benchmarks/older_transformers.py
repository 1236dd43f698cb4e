"""Exports of every family, read by transformers 4: its logits compared with ours in float64, for each kind of
positions.

transformers 4, which vLLM's releases use too, may interpret a folder differently from transformers 5 and our readers.
It is installed separately without its dependencies, and comes first on the path of a process of its own:

    pip install --no-deps --target DIR 'transformers==4.57.*' 'huggingface_hub<1.0' 'tokenizers<0.23'
    python -m benchmarks.older_transformers DIR [FAMILY ...]

With names of families, only they are compared, and the recorded rows of others are kept.

Models are small and random: the tests' configurations of each family with each kind of positions, exported without and
with the folder that transformers 5 wrote, and with an adapter on attention; and multimodal models with plain positions,
exported with the folder, whose language model gets texts alone. `apart` is the largest difference relative
to the largest logit. Models that transformers 4 computes differently according to `moe.interchange.releases` have rows
of their own, with the reason.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

RECORD = Path(__file__).parent / "results" / "older_transformers.json"
TOKENS = 40
CLOSE = 1e-8
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 1.0}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 16},
    "yarn": {**YARN, "truncate": False},
    "yarn, mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5},
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 16, "short_mscale": 1.2,
                 "long_mscale": 1.4},
}  # fmt: skip
LATENT = ("deepseek_v2", "deepseek_v3")
LOCAL = {"rope_type": "default", "rope_theta": 1e3}
"""Positions of layers with a window, where they have their own."""
UNLIKE: dict[str, dict[str, Any]] = {
    "gemma3_text": {"rope_parameters": {"full_attention": {**KINDS["default"], "rope_theta": 3e4},
                                        "sliding_attention": {**LOCAL, **KINDS["linear"]}},
                    "layer_types": ["sliding_attention"] * 3},
    "gpt_oss": {"swiglu_limit": 0.5},
    "qwen2_moe": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3},
}  # fmt: skip
"""Configurations that transformers 4 is known to interpret differently."""
ALIKE: dict[str, dict[str, Any]] = {
    "gpt_oss": {"swiglu_limit": 7.0}, "qwen2_moe": {"use_sliding_window": False},
    "llama4_text": {"attention_bias": False},
}  # fmt: skip
"""Keys of the same families that it interprets alike."""
TEXT = ("qwen3", "mixtral")
"""Language models of a Mistral 3."""


def cases() -> list[tuple[str, str, dict[str, Any]]]:
    """(family, kind of case, config)."""
    from moe.interchange.families import BY_TYPE
    from moe.interchange.releases import UNKNOWN_TO_OLDER, WRAPPERS_OF_OLDER
    from tests.language.families import FAMILIES

    cases = []
    for family in sorted((FAMILIES.keys() & BY_TYPE.keys()) - set(UNKNOWN_TO_OLDER)):
        for number, (kind, rope) in enumerate(KINDS.items()):
            if (kind == "yarn, mscale") != (family in LATENT and kind.startswith("yarn")):
                continue
            if family == "llama4_text" and kind not in ("default", "llama3"):  # it refuses the others
                continue
            if kind != "default" and (kind == "longrope") != (family == "phimoe"):
                continue
            config = FAMILIES[family](Random(f"older {family} {number}"))
            if kind == "longrope":
                num_pairs = (config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]) // 2
                rope = {**rope, "short_factor": [1.0 + 0.2 * pair for pair in range(num_pairs)],
                        "long_factor": [2.0 + 3.0 * pair for pair in range(num_pairs)]}  # fmt: skip
            parameters = config["rope_parameters"]
            partial = {key: parameters[key] for key in ("partial_rotary_factor",) if key in parameters}
            new_parameters = {**rope, **partial, "rope_theta": 3e4}
            full = {key: value for key, value in new_parameters.items() if key != "truncate"}  # refused by layer type
            by_type = {"full_attention": full, "sliding_attention": {**LOCAL, **partial}}
            config["rope_parameters"] = by_type if "full_attention" in parameters else new_parameters
            if kind == "dynamic" and family in LATENT:
                config["qk_rope_head_dim"] = 8
            config |= ALIKE.get(family, {})
            cases.append((family, kind, config))
            if kind == "default" and family in UNLIKE:
                cases.append((family, str(UNLIKE[family]), {**config, **UNLIKE[family]}))
    return cases + [(wrapper, "default", multimodal(wrapper)) for wrapper in WRAPPERS_OF_OLDER]


def multimodal(wrapper: str) -> dict[str, Any]:
    """Config of a multimodal model with plain positions, and pictures' positions where it has some."""
    from moe.interchange.rope import picture_positions
    from tests.language.families import FAMILIES

    config = FAMILIES[wrapper](Random(f"older {wrapper}"))
    if wrapper == "mistral3":
        config["text_config"] = FAMILIES[Random(wrapper).choice(TEXT)](Random(f"older {wrapper}"))
    text = config["text_config"]
    parameters, full = text["rope_parameters"], {**KINDS["default"], "rope_theta": 3e4}
    full |= {key: parameters[key] for key in ("partial_rotary_factor",) if key in parameters}
    text["rope_parameters"] = {**full, **picture_positions(parameters)}
    if "full_attention" in parameters:
        text["rope_parameters"] = {"full_attention": full, "sliding_attention": LOCAL}
    text |= ALIKE.get(text["model_type"], {})
    if wrapper == "llama4":
        text |= {"attention_chunk_size": 5, "layer_types": ["chunked_attention"] * text["num_hidden_layers"]}
    return config


def write(folder: Path, family: str, config: dict[str, Any]) -> dict[str, Any]:
    """Write both exports of a random model, an adapter and our logits; returns the reasons for differences. Of a
    multimodal model, only the export with the folder."""
    from moe.interchange import load_weights
    from moe.interchange.adapters import save_adapter
    from moe.interchange.config import family_of
    from moe.interchange.expand import expand_model
    from moe.interchange.origin import Origin
    from moe.interchange.releases import unlike_older
    from moe.interchange.save import save_folder
    from moe.interchange.sources import ModelSource
    from moe.spec import LanguageModelSpec, model_spec
    from moe.tasks.language import build_model
    from tests.language.model_pairs import their_model

    peer_model = their_model(config)
    for name, buffer in peer_model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.abs_()  # with negative scores transformers 4 chooses experts outside a token's groups
    peer_model.save_pretrained(folder / "theirs", save_original_format=True)
    random, logits = Random(0), {}
    is_multimodal = "text_config" in config
    for has_adapter in (False,) if is_multimodal else (False, True):
        fields = expand_model({"from": str(folder / "theirs")}, None)
        if has_adapter:
            fields["adapter"] = {"rank": 2, "targets": ["*.attention.*"]}
        spec = model_spec(fields)
        assert isinstance(spec, LanguageModelSpec)
        model = build_model(spec, dtype=torch.float64)
        load_weights(str(folder / "theirs"), model, spec)
        origin = Origin.of_folder(str(folder / "theirs"), spec)
        if not has_adapter:
            if not is_multimodal:
                save_folder(spec, ModelSource(model), folder / "anew", dtype=torch.float64)
            save_folder(spec, ModelSource(model), folder / "carried", origin=origin)
            tokens = torch.tensor([[random.randrange(spec.vocab_size) for _ in range(TOKENS)] for _ in range(2)])
        else:
            _fill_adapter(model)
            save_adapter(spec, ModelSource(model), folder / "adapter", origin=origin, dtype=torch.float64)
        with torch.no_grad():
            logits["adapter" if has_adapter else "model"] = model.eval()(tokens)
    torch.save({"tokens": tokens, **logits}, folder / "ours.pt")
    plain = spec.model_copy(update={"adapter": None})
    return {"reasons": list(unlike_older(plain, family_of(origin.config, str(folder))))}


def _fill_adapter(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_lora_b"):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def read(root: Path) -> None:
    """Print differences of this process's transformers from our logits for each folder, as JSON."""
    import peft
    import transformers
    from safetensors.torch import load_file

    from tests.language.model_pairs import as_double

    transformers.logging.set_verbosity_error()
    rows = {}
    for folder in sorted(root.iterdir()):
        our_outputs = torch.load(folder / "ours.pt")
        for form in ("anew", "carried", "adapter"):
            if not (folder / form).exists():
                continue
            base = folder / ("carried" if form == "adapter" else form)
            config = transformers.AutoConfig.from_pretrained(base)
            if hasattr(config, "text_config"):
                rows[f"{folder.name}/{form}"] = _difference(*_multimodal_logits(folder, base, config))
                continue
            with as_double():
                model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").double()
            weights: dict[str, Tensor] = {}
            for path in base.glob("*.safetensors"):
                weights |= load_file(path)
            load_result = model.load_state_dict(weights, strict=False)
            model.tie_weights()
            tied_keys = ["lm_head.weight"] if config.tie_word_embeddings else []
            assert load_result.missing_keys in ([], tied_keys), load_result
            assert not load_result.unexpected_keys, load_result
            if form == "adapter":
                model = peft.PeftModel.from_pretrained(model, folder / "adapter").double()
            with as_double(), torch.no_grad():
                logits = model.eval()(input_ids=our_outputs["tokens"], use_cache=False).logits
            expected = our_outputs["adapter" if form == "adapter" else "model"]
            rows[f"{folder.name}/{form}"] = _difference(logits, expected)
    print(json.dumps({"transformers": transformers.__version__, "peft": peft.__version__, "apart": rows}))


def _multimodal_logits(folder: Path, base: Path, config: Any) -> tuple[Tensor, Tensor]:
    """(logits of this process's class, ours) of texts alone."""
    import transformers

    from tests.language.model_pairs import as_double

    our_outputs = torch.load(folder / "ours.pt")
    model_class = getattr(transformers, config.architectures[0])
    tokens = our_outputs["tokens"]
    with as_double(), torch.no_grad():
        model = model_class.from_pretrained(base, dtype=torch.float64, attn_implementation="eager").eval()
        outputs = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
    return outputs.logits, our_outputs["model"]


def _difference(logits: Tensor, expected: Tensor) -> float:
    return float((logits - expected).abs().max() / expected.abs().max().clamp(min=1))


def main() -> int:
    if sys.argv[1] == "--read":
        read(Path(sys.argv[2]))
        return 0
    from benchmarks import results

    rows, families = [], sys.argv[2:]
    compared_cases = [case for case in cases() if not families or case[0] in families]
    with tempfile.TemporaryDirectory() as temporary:
        for number, (family, kind, config) in enumerate(compared_cases):
            folder = Path(temporary) / f"{number:03}"
            folder.mkdir()
            rows.append({"family": family, "case": kind, **write(folder, family, config)})
        path = os.pathsep.join([sys.argv[1], *filter(None, [os.environ.get("PYTHONPATH")])])
        process = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.older_transformers", "--read", temporary],
            env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
    answer = json.loads(process.stdout.splitlines()[-1])
    for number, row in enumerate(rows):
        row["apart"] = {
            form: answer["apart"][f"{number:03}/{form}"] for form in ("anew", "carried", "adapter")
            if f"{number:03}/{form}" in answer["apart"]
        }  # fmt: skip
    recorded_rows = json.loads(RECORD.read_text())["figures"]["rows"] if families else []
    rows = sorted(
        [*(row for row in recorded_rows if row["family"] not in families), *rows], key=lambda row: row["family"]
    )
    figures = {key: answer[key] for key in ("transformers", "peft")} | {"tokens": TOKENS, "rows": rows}
    num_unexpected = 0
    for row in rows:
        worst = max(row["apart"].values())
        as_said = (worst > CLOSE) == bool(row["reasons"])
        num_unexpected += not as_said
        print(f"{row['family']:18} {row['case']:44} {worst:9.1e}  {'; '.join(row['reasons'])}"
              f"{'' if as_said else '   NOT AS SAID'}")  # fmt: skip
    print(
        f"transformers {answer['transformers']}, PEFT {answer['peft']}; {results.write('older_transformers', figures)}"
    )
    return 1 if num_unexpected else 0


if __name__ == "__main__":
    sys.exit(main())

"""The model card of an export: plain facts, in the form in which hubs read them."""

from collections.abc import Mapping

from moe.interchange.origin import Origin
from moe.spec import LanguageModelSpec


def model_card(spec: LanguageModelSpec, facts: Mapping[str, str], origin: Origin | None) -> str:
    """`README.md`: what the model is, and what is said of its training."""
    began = "random weights" if origin is None else f"the weights of `{origin.url.rpartition('/')[2]}`"
    lines = [
        "---", "library_name: transformers", "pipeline_tag: text-generation", "---", "",
        f"# {facts.get('name', 'A language model')}", "",
        "Trained with Shardyard.", "",
        f"- Began with: {began}",
        f"- Parameters: {spec.num_parameters():,}, of which a token uses {spec.num_active_parameters():,}",
        f"- Layers: {spec.num_layers}, of width {spec.model_dim}",
    ]  # fmt: skip
    if spec.moe is not None:
        lines.append(f"- Experts: {spec.moe.num_experts} in each of {len(spec.moe_layers)} layers, "
                     f"{spec.moe.experts_per_token} for each token")  # fmt: skip
    if origin is not None and origin.untrained:
        lines.append(
            f"- Not trained, and unchanged: {len(origin.untrained)} tensors of heads that predict further tokens"
        )
    lines += [f"- {key}: {value}" for key, value in facts.items() if key != "name"]
    return "\n".join(lines) + "\n"

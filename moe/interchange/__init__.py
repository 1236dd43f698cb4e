"""Reads and writes models in the Hugging Face format, shard by shard.

    config, families     conversion between config.json and our spec, one table per family      (no torch)
    expand               fills in a job's `model: {from: FOLDER}`                                (no torch)
    pieces               maps elements of Hugging Face tensors to elements of our parameters     (no torch)
    headers, tensor_reader    safetensors files: headers, and tensors read in parts and dequantized
    fitting              checks a folder's tensors against a model                               (no torch)
    adapter_parts, adapter_config    names of an adapter's matrices in PEFT, and its config      (no torch)
    load, save           load a folder into a placed model; write a model to a folder, in parts
    adapters             load and save adapters in PEFT's format
    tokenizer            tokenizer.json, or one converted from a tiktoken file

Names are imported lazily, so that a spec is expanded without torch. `load_hf` and `save_hf`, which build a model, are
in `moe.export.hugging_face`.
"""

from moe.lazy import lazy_names

_MODULES = {
    "Origin": "moe.interchange.origin",
    "load_weights": "moe.interchange.load",
    "save_folder": "moe.interchange.save",
    "load_hf": "moe.export.hugging_face",
    "save_hf": "moe.export.hugging_face",
}

__all__ = list(_MODULES)

__getattr__, __dir__ = lazy_names(__name__, _MODULES)

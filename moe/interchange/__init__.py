"""Models in the Hugging Face format, in and out, shard by shard.

    config, families     their config.json and our spec, a table a family      (no torch)
    expand               a job's `model: {from: FOLDER}`, filled in             (no torch)
    pieces               which element of their tensors is which of ours        (no torch)
    headers, tensor_reader    safetensors files: their headers; their bytes, read in parts and decoded
    fitting              whether a folder's tensors make a model, told at once
    adapter_parts, adapter_config    where PEFT has what of an adapter, and its config    (no torch)
    load, save           a folder into a placed model; a model, in parts, into a folder
    adapters             an adapter in PEFT's format, in and out
    tokenizer            tokenizer.json, and one made of a tiktoken file

Names are handed on lazily, so that a spec is expanded without torch; `load_hf` and `save_hf`, which build a model, lie
in `moe.export.hugging_face`.
"""

from moe.lazy import lazy_names

_WHERE = {
    "Origin": "moe.interchange.origin",
    "load_weights": "moe.interchange.load",
    "save_folder": "moe.interchange.save",
    "load_hf": "moe.export.hugging_face",
    "save_hf": "moe.export.hugging_face",
}

__all__ = list(_WHERE)

__getattr__, __dir__ = lazy_names(__name__, _WHERE)

"""Writing of a model as a GGUF file, which llama.cpp runs: tensors, metadata and vocabulary."""

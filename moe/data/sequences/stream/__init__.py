"""Streams of documents: read, tokenized and packed while a model trains, in windows that the next ones replace. Loads
no torch.

Files (`shards`) → an endless order of them for each partition (`order`) → documents (`reading`) → windows (`window`),
written by a background process (`builder`, `builder_process`) → rows of any step (`sampler`). `sample` is the part that
is prepared before training.
"""

"""Build a language model from its spec, under a layout."""

from functools import partial

from moe.tasks.language.model import LanguageModel
from moe.tasks.sharded_model import build_sharded

build_model = partial(build_sharded, LanguageModel)
"""`build_sharded` of this kind of model."""

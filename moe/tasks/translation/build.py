"""Build a translation model from its spec, under a layout."""

from functools import partial

from moe.tasks.sharded_model import build_sharded
from moe.tasks.translation.model import TranslationModel

build_model = partial(build_sharded, TranslationModel)
"""`build_sharded` of this kind of model."""

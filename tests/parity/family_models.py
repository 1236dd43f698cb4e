"""Random small models of each family that can be loaded, of sizes that a layout divides."""

from functools import cache
from itertools import count
from random import Random

from moe.interchange.config import describe_config
from moe.plan.fit import fit_problems, stage_problems
from moe.spec import LanguageModelSpec
from tests.language.families import FAMILIES
from tests.language.model_pairs import GROUPS
from tests.parity.trajectory import Degrees


@cache
def family_model(family: str, degrees: Degrees) -> LanguageModelSpec:
    """The first random model of the family whose dimensions are divisible by the degrees, with layers for its
    stages."""
    for seed in count():
        spec = _read(family, seed)
        stages = degrees.pipeline, degrees.virtual_stages, degrees.stages
        if not fit_problems(spec, degrees.plan(num_groups=1).degrees.axes) and not stage_problems(spec, *stages):
            return spec
    raise AssertionError("unreachable")


@cache
def _read(family: str, seed: int) -> LanguageModelSpec:
    config = FAMILIES[family](Random(f"{family} {seed}"))
    fields = describe_config(config, "config.json").model_fields
    if "moe" in fields:
        fields = {**fields, "moe": {**fields["moe"], **GROUPS["moe"]}}
    return LanguageModelSpec(**fields)

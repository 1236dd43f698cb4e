"""Parameter groups of an optimizer: parameters with the same update settings."""

from collections.abc import Iterable
from typing import Any

from moe.parallel import LocalParameter
from moe.spec.optimizer import OptimizerSpec, UpdateSettings


def group_parameters(spec: OptimizerSpec, parameters: Iterable[LocalParameter]) -> list[list[LocalParameter]]:
    """Parameters by their update settings, in order of first occurrence. Without parameters, one empty group, since
    torch's optimizers need a group."""
    groups: dict[UpdateSettings, list[LocalParameter]] = {}
    for parameter in parameters:
        groups.setdefault(_settings(spec, parameter), []).append(parameter)
    return list(groups.values()) or [[]]


def param_groups(spec: OptimizerSpec, groups: list[list[LocalParameter]]) -> list[dict[str, Any]]:
    """torch's form of `group_parameters`, with `lr_factor` and `weight_decay`."""
    return [
        {"params": [parameter.local for parameter in group], **_settings_of_group(spec, group)._asdict()}
        for group in groups
    ]


def _settings_of_group(spec: OptimizerSpec, group: list[LocalParameter]) -> UpdateSettings:
    return _settings(spec, group[0]) if group else UpdateSettings(1.0, 0.0)


def _settings(spec: OptimizerSpec, parameter: LocalParameter) -> UpdateSettings:
    return spec.update_settings(parameter.name, is_vector=parameter.part.is_vector)

"""Automatic sharding of any torch module (GShard, arXiv 2006.16668, section 3): a few annotations or none, a plan, one
program for every number of devices."""

from moe.sharding.applied import scaling as _scaling  # noqa: F401  # makes GradScaler agree across ranks
from moe.sharding.applied.applied import Applied, close
from moe.sharding.applied.local_steps import local_steps
from moe.sharding.apply import apply
from moe.sharding.hints.annotate import replicate, shard, split
from moe.sharding.hints.hints import Devices, Partial, Replicate, Shard, Split
from moe.sharding.hints.manual import manual
from moe.sharding.planner import plan
from moe.sharding.rules.registry import register
from moe.sharding.saved.load import load
from moe.sharding.saved.save import SaveError, save
from moe.sharding.saved.whole_tensors import state_dict
from moe.sharding.sharding_plan import ShardingPlan

__all__ = [
    "plan", "apply", "Split", "Replicate", "Shard", "split", "replicate", "shard", "manual", "Partial", "Devices",
    "save", "load", "state_dict", "SaveError", "close", "register", "local_steps", "Applied", "ShardingPlan",
]  # fmt: skip

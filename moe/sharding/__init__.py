"""Automatic sharding of any torch module (GShard, arXiv 2006.16668, section 3): a few annotations or none, a plan, one
program for every number of devices."""

from moe.sharding.applied.applied import Applied, close
from moe.sharding.applied.clipping import clip_grad_norm_
from moe.sharding.applied.optimizers import elementwise
from moe.sharding.apply import apply
from moe.sharding.hints.annotate import replicate, shard, split
from moe.sharding.hints.hints import Devices, Partial, Replicate, Shard, Split
from moe.sharding.hints.manual import manual
from moe.sharding.planner import plan
from moe.sharding.rules.registry import register
from moe.sharding.saved.load import load
from moe.sharding.saved.save import SaveError, save
from moe.sharding.saved.whole import state_dict
from moe.sharding.sharding_plan import ShardingPlan

__all__ = [
    "plan",
    "apply",
    "Split",
    "Replicate",
    "Shard",
    "split",
    "replicate",
    "shard",
    "manual",
    "Partial",
    "Devices",
    "clip_grad_norm_",
    "elementwise",
    "save",
    "load",
    "state_dict",
    "SaveError",
    "close",
    "register",
    "Applied",
    "ShardingPlan",
]

"""Automatic sharding of any torch module (GShard, arXiv 2006.16668, section 3): a few annotations or none, a plan, one
program for every number of devices."""

from moe.sharding.annotate import replicate, shard, split
from moe.sharding.applied import Applied, clip_grad_norm_, close
from moe.sharding.apply import apply
from moe.sharding.hints import Partial, Replicate, Shard, Split
from moe.sharding.manual import manual
from moe.sharding.planner import plan
from moe.sharding.rules.registry import register
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
    "clip_grad_norm_",
    "close",
    "register",
    "Applied",
    "ShardingPlan",
]

"""Sweeps: families of jobs that differ in the values of some fields. No torch."""

from moe.spec.sweep.members import SweepMember, SweepRequest
from moe.spec.sweep.spec import MAX_MEMBERS, SweepFieldSpec, SweepSpec

__all__ = ["MAX_MEMBERS", "SweepFieldSpec", "SweepMember", "SweepRequest", "SweepSpec"]

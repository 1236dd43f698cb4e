"""A node whose temporary folder, where recorders spool, is the test's own; and a stand-in for a Ray head."""

from tests.node import node
from tests.procs.stand_in_ray import hold, state_dir

__all__ = ["hold", "node", "state_dir"]

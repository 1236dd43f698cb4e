"""A cluster's devices and links, and what was measured of them."""

from moe.plan.cluster.calibration import Calibration
from moe.plan.cluster.cluster import Cluster, Link, cluster_of, read_cluster
from moe.plan.cluster.devices import DEVICES, Device

__all__ = ["DEVICES", "Calibration", "Cluster", "Device", "Link", "cluster_of", "read_cluster"]

"""Devices and links of a cluster, and their measured rates."""

from moe.plan.cluster.calibration import Calibration
from moe.plan.cluster.cluster import Cluster, Link
from moe.plan.cluster.devices import DEVICES, Device
from moe.plan.cluster.pools import Pool, Pools, cluster_of, read_cluster

__all__ = ["DEVICES", "Calibration", "Cluster", "Device", "Link", "Pool", "Pools", "cluster_of", "read_cluster"]

"""Manifests that tests create."""

from typing import Any

Object = dict[str, Any]

PART_OF = {"app.kubernetes.io/part-of": "shardyard"}


def ray_job(name: str, submission: str = "", **spec: Any) -> Object:
    """A RayJob that KubeRay's definition accepts."""
    labels = PART_OF | ({"shardyard.dev/submission": submission} if submission else {})
    template = {"spec": {"containers": [{"name": "ray-head", "image": "shardyard:test"}]}}
    head = {"rayStartParams": {"num-cpus": "0"}, "template": template}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name, "labels": labels},
        "spec": {"entrypoint": "true", "rayClusterSpec": {"headGroupSpec": head}, **spec},
    }


def pod(name: str, submission: str = "", *, owner: Object | None = None) -> Object:
    labels = PART_OF | ({"shardyard.dev/submission": submission} if submission else {})
    metadata: Object = {"name": name, "labels": labels}
    if owner is not None:
        metadata["ownerReferences"] = [reference(owner)]
    limits = {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": 8}
    container = {"name": "ray-worker", "image": "shardyard:test", "resources": {"limits": limits}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}


def reference(owner: Object) -> Object:
    """Owner reference of a controller that blocks its owner's deletion in the foreground."""
    metadata = owner["metadata"]
    fields = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": metadata["name"],
        "uid": metadata["uid"],
    }
    return {**fields, "controller": True, "blockOwnerDeletion": True}


def event(name: str, about: Object, reason: str, message: str, type: str = "Warning") -> Object:
    metadata = about["metadata"]
    involved = {"kind": about.get("kind", "Pod"), "name": metadata["name"], "uid": metadata["uid"]}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name},
        "involvedObject": involved,
        "type": type,
        "reason": reason,
        "message": message,
    }

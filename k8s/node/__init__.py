"""A stand-in for a Kubernetes cluster of one node: runs the pods of an overlay on this machine, from an image that
buildah has built, in crun's containers. `docker/run_unprivileged.sh` starts it.

It plays the parts of the kubelet (users, capabilities, seccomp, volumes, limits, readiness, restarts), of the KubeRay
operator (the pods of a RayCluster) and of `kubectl port-forward`. It has no network policies, liveness probes and API
server, so the launcher `kuberay` cannot run on it.
"""

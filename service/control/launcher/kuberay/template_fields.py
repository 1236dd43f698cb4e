"""Fields of pod templates: those that a template may set, and names that are this service's or Kubernetes's."""

RAY_CONTAINER = "ray"
"""Name in templates of the container that runs Ray, in the head and in workers."""
OUR_KEYS = ("shardyard.dev/", "ray.io/", "kueue.x-k8s.io/", "app.kubernetes.io/part-of", "app.kubernetes.io/component",
            "app.kubernetes.io/name", "app.kubernetes.io/created-by")  # fmt: skip
"""Labels and annotations, by prefix, that this service, KubeRay and Kueue read."""
OUR_VARIABLES = frozenset(
    {"HOME", "FQ_RAY_IP", "KUBERAY_GEN_RAY_START_CMD", "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN",
     "RAY_AUTH_TOKEN_PATH", "RAY_CLOUD_INSTANCE_ID", "RAY_CLUSTER_NAME", "RAY_IP", "RAY_NODE_TYPE_NAME", "RAY_PORT",
     "RAY_REDIS_ADDRESS", "RAY_enable_autoscaler_v2", "REDIS_PASSWORD", "REDIS_USERNAME"}
)  # fmt: skip
"""Variables that this service or KubeRay sets, or that change how KubeRay starts Ray."""
MAX_ANNOTATION_BYTES = 192 * 1024
"""Maximum number of bytes of a template's annotations. Kubernetes keeps 256 KiB, of which some are ours and the
cluster's."""
VARIABLE_SOURCES = ("configMapKeyRef", "fieldRef", "resourceFieldRef", "secretKeyRef")
PROJECTED_SOURCES = ("clusterTrustBundle", "configMap", "downwardAPI", "secret", "serviceAccountToken")
"""Sources of projected volumes. `podCertificate` is none: it speaks for the pods' service account."""
VOLUME_SOURCES = ("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected",
                  "secret")  # fmt: skip
"""Sources of volumes that Pod Security `restricted` admits."""
RESERVED_CONTAINERS = frozenset({"ray-head", "ray-worker", "wait-gcs-ready", "autoscaler", "ray-job-submitter"})
FREE_POD_FIELDS = {"affinity": dict, "dnsConfig": dict, "hostAliases": list, "priorityClassName": str,
                    "runtimeClassName": str, "schedulerName": str, "tolerations": list,
                    "topologySpreadConstraints": list}  # fmt: skip
"""Fields of a pod that a template may set to any value of this type."""
RAY_FIELDS = ("name", "image", "imagePullPolicy", "env", "envFrom", "volumeMounts", "securityContext")
FREE_CONTAINER_FIELDS = {"args": list, "command": list, "image": str, "imagePullPolicy": str, "lifecycle": dict,
                          "livenessProbe": dict, "readinessProbe": dict, "restartPolicy": str, "startupProbe": dict,
                          "terminationMessagePath": str, "terminationMessagePolicy": str,
                          "workingDir": str}  # fmt: skip
CONTAINER_SECURITY_FIELDS = ("allowPrivilegeEscalation", "capabilities", "privileged", "readOnlyRootFilesystem",
                              "runAsGroup", "runAsNonRoot", "runAsUser")  # fmt: skip
POD_SECURITY_FIELDS = ("fsGroup", "fsGroupChangePolicy", "runAsGroup", "runAsNonRoot", "runAsUser",
                        "supplementalGroups")  # fmt: skip
PROBES = ("lifecycle", "livenessProbe", "readinessProbe", "startupProbe")
APPARMOR = "container.apparmor.security.beta.kubernetes.io/"
REMEDIES = {
    "automountServiceAccountToken": "omit it: pods have no token of the API server",
    "hostIPC": "omit it: pods share nothing with their node",
    "hostPID": "omit it: pods share nothing with their node",
    "lifecycle": "omit it: Ray's container waits for a checkpoint before it ends",
    "livenessProbe": "omit it: KubeRay probes Ray",
    "readinessProbe": "omit it: KubeRay probes Ray",
    "resources": "omit it: the node pool and the number of workers determine them",
    "command": "omit it: KubeRay starts Ray",
    "args": "omit it: KubeRay starts Ray",
    "serviceAccountName": "omit it: the operator sets SHARDYARD_KUBERAY_SERVICE_ACCOUNT",
    "terminationGracePeriodSeconds": "omit it: the operator sets SHARDYARD_KUBERAY_TERMINATION_GRACE_S",
}

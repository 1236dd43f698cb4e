"""Names and labels of a submission's objects."""

import hashlib
import re

PART_OF = {"app.kubernetes.io/part-of": "shardyard"}
"""Label of all objects of this service."""
INSTANCE_LABEL = "shardyard.dev/instance"
"""Installation of this service that an object belongs to: several may share a namespace."""
JOB_LABEL = "shardyard.dev/job"
ATTEMPT_LABEL = "shardyard.dev/attempt"
SUBMISSION_LABEL = "shardyard.dev/submission"
SUBMISSION_ANNOTATION = "shardyard.dev/submission-id"
"""The exact submission id, which the label has as a hash where it is too long."""
MAX_NAME_LENGTH = 47
"""Longest name of a RayJob: KubeRay appends six characters for its cluster, and to those the names of Services."""
MAX_LABEL_LENGTH = 63

_DNS_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_SUBMISSION = re.compile(r"(?P<job>.+)-a(?P<attempt>[1-9][0-9]*)")
_HASH_LENGTH = 16


def ray_job_name(submission_id: str) -> str:
    """Name of the RayJob: `shardyard-<job>-<attempt>`, with a hash of the id where that is too long or no DNS label."""
    match = _SUBMISSION.fullmatch(submission_id)
    name = f"shardyard-{match['job']}-{match['attempt']}" if match else ""
    if _DNS_LABEL.fullmatch(name) and len(name) <= MAX_NAME_LENGTH:
        return name
    return f"shardyard-h-{_hash(submission_id)}"


def submission_labels(submission_id: str) -> dict[str, str]:
    """Labels that select the objects of one submission."""
    return {**PART_OF, SUBMISSION_LABEL: label_value(submission_id)}


def object_labels(job_id: str, attempt: int, submission_id: str) -> dict[str, str]:
    """Labels of a submission's objects: `submission_labels`, job and attempt."""
    labels = {JOB_LABEL: label_value(job_id), ATTEMPT_LABEL: str(attempt)}
    return {**submission_labels(submission_id), **labels}


def label_value(text: str) -> str:
    """The text, or a hash of it where it is no value of a label."""
    if len(text) <= MAX_LABEL_LENGTH and _LABEL.fullmatch(text):
        return text
    return f"h-{_hash(text)}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_LENGTH]

"""File descriptor limit of this process: each connection needs one."""

import resource


def allow_descriptors(num_descriptors: int) -> int:
    """Raise the soft limit towards `num_descriptors`, up to the hard limit; returns the number allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < num_descriptors:
        soft = num_descriptors if hard == resource.RLIM_INFINITY else min(num_descriptors, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return num_descriptors if soft == resource.RLIM_INFINITY else soft

"""Files that this process may have open: each connection is one."""

import resource


def allow_descriptors(num_descriptors: int) -> int:
    """Raises the limit to `num_descriptors` where the hard limit allows it, and returns how many there may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < num_descriptors:
        soft = num_descriptors if hard == resource.RLIM_INFINITY else min(num_descriptors, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return num_descriptors if soft == resource.RLIM_INFINITY else soft

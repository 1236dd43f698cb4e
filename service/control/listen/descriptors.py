"""Files that this process may have open: each connection is one."""

import resource


def allow_descriptors(needed: int) -> int:
    """Raises the limit to `needed` where the hard limit allows it, and returns how many there may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return needed if soft == resource.RLIM_INFINITY else soft

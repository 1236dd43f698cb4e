"""Before anything else is imported: one thread a process, as workers that share cores run."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

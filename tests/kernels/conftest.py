"""The kernels run on a GPU if there is one, and otherwise in Triton's interpreter. Triton is for Linux."""

import importlib.util

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]

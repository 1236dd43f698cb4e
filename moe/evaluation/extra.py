"""lm-evaluation-harness as an optional extra: whether it is installed, and its environment."""

import os
from importlib.util import find_spec

INSTALL = "pip install 'shardyard[evaluate]'"
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_EVALUATE_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TQDM_DISABLE": "1",
}
"""Environment of the harness: no access to the hub, no progress bars."""


class HarnessMissing(Exception):
    """lm-evaluation-harness is not installed; the message says how to install it."""


def require_harness() -> None:
    """Prepare the environment for importing `moe.evaluation.harness`, which must not be imported before.

    Raises HarnessMissing.
    """
    if find_spec("lm_eval") is None:
        raise HarnessMissing(f"evaluation requires lm-evaluation-harness, which is not installed: {INSTALL}")
    os.environ.update(_OFFLINE)

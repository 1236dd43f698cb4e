"""lm-evaluation-harness as an extra of the package: whether it is installed, and what it may not do."""

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
"""Environment of what the harness brings: no hub is asked, and no bars are drawn."""


class HarnessMissing(Exception):
    """The harness is not there; the message says what to install."""


def require_harness() -> None:
    """Returns where `moe.evaluation.harness` can be imported, which must not be done before: what the harness brings
    reads its environment then. Raises HarnessMissing."""
    if find_spec("lm_eval") is None:
        raise HarnessMissing(
            f"tasks are evaluated with lm-evaluation-harness, which is not installed: {INSTALL}"
        )
    os.environ.update(_OFFLINE)

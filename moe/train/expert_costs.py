"""Which backend multiplies in the experts of a run: settled once, kept with the run, the same on every rank."""

import json
from pathlib import Path

from moe.experts import stored_or_measured
from moe.experts.choice import Shape, from_json, to_json
from moe.parallel import Layout, together
from moe.storage.folder import Folder
from moe.tasks.translation import TranslationModel

FILE = "expert-costs.json"
"""By shape, what each backend was measured to take."""


def settle(model: TranslationModel, layout: Layout, run: Folder, cache: Path) -> None:
    """Give the model's experts the measured costs of the backends. All ranks call it together.

    What the run has taken before, on a machine of the same kind, it takes again, so that a restart changes no bit;
    else what this machine's `cache` holds; else it is measured now. Rank 0 decides for all.
    """
    layers = model.moe_layers()
    if not layers:
        return

    def decided() -> dict[str, dict[str, float]]:
        w_in = layers[0].experts.like_w_in(model.compute_dtype)
        key = Shape.of(w_in).key
        if key not in _known(run):
            measured = to_json(stored_or_measured(w_in, cache))
            known = {key: measured, **_known(run)}  # measuring takes a while: whoever was faster has decided
            run.write(FILE, json.dumps(known, indent=1).encode())
        return _known(run)[key]

    costs = from_json(together.from_first(decided))
    for layer in layers:
        layer.experts.costs = costs


def _known(run: Folder) -> dict[str, dict[str, dict[str, float]]]:
    try:
        known: dict[str, dict[str, dict[str, float]]] = json.loads(run.read(FILE))
    except FileNotFoundError:
        return {}
    return known

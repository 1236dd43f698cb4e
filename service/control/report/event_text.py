"""Events as JSON text, assembled from stored text without parsing it."""

import json
from dataclasses import dataclass

from pydantic_core import to_json

from service.control.store.clock import to_datetime
from service.control.store.events import EventRow
from service.wire.events import rfc3339

_LAYERS = '"layers":[{'
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}


@dataclass(frozen=True)
class WireEvent:
    """An event ready to send to any number of streams."""

    id: int
    kind: str
    json: str


def to_wire(row: EventRow) -> WireEvent:
    attempt = "null" if row.attempt is None else str(row.attempt)
    superseded_text = f',"superseded":"{row.superseded}"' if row.superseded else ""
    text = (
        f'{{"id":{row.id},"kind":"{row.kind}","time":"{time_text(row.time)}","attempt":{attempt},'
        f'"actor":{json.dumps(row.actor)},"data":{row.data}{superseded_text}}}'
    )
    return WireEvent(row.id, row.kind, text)


def time_text(time_us: int) -> str:
    """A stored time as RFC 3339."""
    return rfc3339(to_datetime(time_us))


def data_text(data: object) -> str:
    """JSON text of an event's data, with null for non-finite numbers; one line even for readers that end lines at
    U+2028."""
    text = to_json(data, inf_nan_mode="null").decode()
    return text.translate(_LINE_ENDS) if not text.isascii() else text


def without_layers(text: str) -> str:
    """JSON text of a record without the objects in `layers`, including those of `label_loads`: the expert loads, which
    are most of the text. Quotes within JSON strings are escaped, so that a match is always a key. If layers contain
    objects themselves, as in no record of this release, the result is not JSON."""
    parts, begin = [], 0
    while (start := text.find(_LAYERS, begin)) >= 0 and (end := text.find("}]", start)) >= 0:
        parts.append(text[begin : start + len(_LAYERS) - 1])
        begin = end + 1
    return "".join((*parts, text[begin:]))

"""Parts that a translation must carry over unchanged: format fields and mark-up."""

import re
from collections.abc import Hashable

# One alternative each: `%%`, Python's and C's printf fields, brace fields, shell-like variables, HTML tags.
# printf's flag ' ' is left out on purpose: "100 % des" is French, not a field. Tags are a closed list,
# because "<file>" in a usage text is a word to translate.
_FIELD = re.compile(
    r"%%"
    r"|%\((?P<named>\w+)\)[-+#0]*\d*(?:\.\d+)?(?P<named_type>[a-zA-Z])"
    r"|%(?:\d+\$)?[-+#0']*(?:\d+|\*)?(?:\.(?:\d+|\*))?(?:hh|h|ll|l|L|q|j|z|t)?(?P<printf>[diouxXeEfFgGaAcspn])"
    r"|%(?P<numbered>\d)(?!\d)"
    r"|\{(?P<brace>\w*(?:[.\[][\w.\[\]]*)?)(?:![rsa])?(?::[^{}]*)?\}"
    r"|\$\{?(?P<shell>[A-Za-z_]\w+)\}?"
    r"|<(?P<tag>/?(?:a|abbr|b|big|br|code|div|em|h[1-6]|hr|i|img|kbd|li|ol|p|pre|q|s|small|span|strong|sub|sup"
    r"|table|td|th|tr|tt|u|ul|var))(?:\s[^<>]*)?/?>",
    re.IGNORECASE,
)

_SIGN = re.compile(r"[%{$<]")


def placeholders(text: str) -> tuple[Hashable, ...]:
    """The fields and tags in a text, sorted; equal for a text and a translation that keeps them all.

    The order, the width and the attributes may change in translation; names, types and counts may not.
    """
    if _SIGN.search(text) is None:
        return ()
    fields = []
    for match in _FIELD.finditer(text):
        kind = match.lastgroup
        if kind is None:  # %% is a per cent sign
            continue
        if kind == "named_type":
            fields.append(("named", f"{match['named']}:{match['named_type']}"))
        elif kind == "tag":
            fields.append((kind, match["tag"].lower()))
        else:
            fields.append((kind, match[kind]))
    return tuple(sorted(fields))

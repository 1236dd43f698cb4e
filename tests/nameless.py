"""A user without a home folder and without an entry in the user database, as in containers."""

import os
import shutil

NAMELESS = "setpriv --reuid=54321 --regid=54321 --clear-groups --inh-caps=+dac_override --ambient-caps=+dac_override"
"""Runs a command as such a user; the capability lets it read this user's Python."""
HOMES = ("HOME", "USER", "LOGNAME", "USERNAME", "LNAME")


def can_be_nameless() -> bool:
    return os.getuid() == 0 and shutil.which("setpriv") is not None

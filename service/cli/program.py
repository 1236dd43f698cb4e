"""The program's name as users type it."""

import os
import shlex
import shutil
import sys

NAME = "shardyard"


def program() -> str:
    """`shardyard`, or the path it was started by if the search path does not find it."""
    path = sys.argv[0]
    if os.path.basename(path) != NAME or not os.path.isfile(path):
        return NAME
    on_path = shutil.which(NAME)
    return NAME if on_path is not None and os.path.samefile(on_path, path) else shlex.quote(path)

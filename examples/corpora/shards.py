"""Writes the source of installed packages as compressed shards, for `examples/stream.yaml`:
`python -m examples.corpora.shards FOLDER`."""

import gzip
import json
import sys
from pathlib import Path

from moe.data.sequences.packages import Packages

NUM_SHARDS = 16


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": document.text}) + "\n" for document in Packages().documents()]
    for index in range(NUM_SHARDS):
        content = "".join(lines[index::NUM_SHARDS]).encode()
        (folder / f"{index:02}.jsonl.gz").write_bytes(gzip.compress(content))
    print(f"{NUM_SHARDS} shards in {folder}")


if __name__ == "__main__":
    main()

"""Files that users upload: received in parts, checked by hash, named in specs as `upload://`."""

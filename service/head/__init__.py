"""A Ray head of this machine's own, for `shardyard up`: started, tended, ended."""

"""A local Ray head for `shardyard up`: started, supervised, stopped."""

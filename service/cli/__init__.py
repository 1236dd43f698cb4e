"""The command `shardyard`: a client of the public API, and commands that start a local control plane.

Commands import heavy modules in their bodies, so that `shardyard --help` is fast.
"""

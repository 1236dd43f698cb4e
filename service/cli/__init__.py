"""The command `shardyard`: a client of the public API, and what starts a control plane on this machine.

Modules import what is heavy inside the commands, so that `shardyard --help` answers at once.
"""

"""The service: `cli` and `client` for people, `control` in the control plane's process, `run` on the cluster, `wire`
for what these say to each other, and `head` for a Ray cluster of this machine's own."""

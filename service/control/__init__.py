"""The control plane's process: takes job specs over HTTP, keeps each job alive on a Ray cluster, shows what happens."""

"""Builds the Helm chart `k8s/chart` from the kustomize base and components: `python -m k8s.chart_builder`."""

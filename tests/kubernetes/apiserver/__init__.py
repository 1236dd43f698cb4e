"""A small Kubernetes API server for tests: storage, versions, schemas and access as kube-apiserver has them, without
controllers other than garbage collection.

No package does this: kmock 0.8 answers without versions, conflicts, pages or schemas, and mockernetes 0.2 patches the
Python client inside the process.
"""

"""Evaluation of trained language models on tasks of a file, through lm-evaluation-harness: an extra of the package,
which `harness` alone imports.

A file of tasks is data: `task_file` reads it, `documents` fills its templates with the lines of its data files, and the
harness gets texts. It never sees a template, a path or a name of a data set.
"""

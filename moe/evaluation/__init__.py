"""Evaluation of language models with lm-evaluation-harness (an optional extra, imported by `harness` only).

Tasks are pure data: `task_file` reads them, `documents` renders their templates, and the harness receives texts. It
never sees templates, paths or data set names.
"""

"""Importing this compiles the pages' templates: once, in the process that control planes are forked from."""

from service.web.page import compile_templates

compile_templates()

"""Command lines and the assembly of a run from its configuration.

Read `main_base`, then `command` (arguments to exit code), `run` and `experiment`.
"""

"""Command lines, and how a run is assembled from its configuration.

Read `main_base`, then `command` (arguments to exit code), `run` and `experiment`.
"""

"""Outputs of a run: metrics, console, run folder, trackers and the report.

Read `names`, then `run_dir`, `sinks` and `report/`.
"""

"""report.html and report.png of a run.

Read `report`, then `charts`; `timeline` is the chart of trainer and engines of asynchronous runs.
"""

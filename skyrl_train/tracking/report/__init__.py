"""report.html and report.png of a run.

Read `report`, then `charts`.
"""

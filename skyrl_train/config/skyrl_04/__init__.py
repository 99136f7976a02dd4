"""Command lines of skyrl_train 0.4: what each of its keys means here (`table.yaml`), as data.

Read `table` (the rules), `translate` (overrides -> overrides), then `notice` (what a user is told).
"""

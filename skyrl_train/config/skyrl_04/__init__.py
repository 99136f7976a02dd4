"""Translation of command lines of skyrl_train 0.4; `table.yaml` has the meaning of each of its keys.

Read `table` (the rules), `translate` (overrides -> overrides), then `notice` (the warning).
"""

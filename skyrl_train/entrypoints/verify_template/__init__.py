"""Check of a chat template for conversations of several turns: the command (`program.py`), and before each run
(`before_run.py`). What it compares is in `data/exactness.py`.
"""

from skyrl_train.entrypoints.verify_template.program import main

__all__ = ["main"]

"""Check of a chat template for conversations of several turns: the command (`__main__.py`), and before each run
(`before_run.py`). What it compares is in `data/exactness.py`.
"""

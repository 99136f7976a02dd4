"""The engines: which are up, where requests go, and how one that died is replaced.

Read: pool.py (all that the trainer asks), replica.py (one engine and its successors), settings.py (what it is told).
"""

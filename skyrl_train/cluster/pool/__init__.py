"""The engine pool: which engines are up, routing of requests, replacement of dead engines. Read: pool.py (the trainer's
interface), router.py (requests), replica.py (one engine and its replacements), settings.py (engine settings),
teacher.py (engines of a frozen teacher).
"""

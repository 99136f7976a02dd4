"""The inference engines of a run as Ray actors: placement, health, replacement and requests.

Read `engine_group`, then `engine_place`.
"""

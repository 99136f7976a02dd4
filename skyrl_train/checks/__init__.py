"""Checks of a configuration and of a model's files, made before anything starts.

Read `rl`, then `model_folder`.
"""

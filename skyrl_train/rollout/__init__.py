"""Rollouts: samples of one prompt, groups of many, and the sources that collect them for a step.

Read `sample`, then `episode`, `collect` and `source`.
"""

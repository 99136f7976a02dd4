"""Samples from one environment and one `generate`, groups from many at once.

Read `sample`, then `episode` and `collect`.
"""

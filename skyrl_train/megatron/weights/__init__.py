"""Weights on their way out of the ranks: Hugging Face names, gathering, files and digests.

Read `export`, then `gather` and `live_sums`.
"""

"""Comparison of the logprobs of engines and trainer: before the first update, at every step and after syncs.

Read `sync_check`, then `logprob_bound`.
"""

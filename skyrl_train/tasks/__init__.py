"""Tiny experiments: a model of 0.3 million parameters with data that it learns in minutes.

Read `tiny` (model, tokenizer and sums), then `quickstart`.
"""

"""Tiny experiments: a language model of 0.3 million parameters with data that it can learn in minutes.

Read `tiny` (model, tokenizer and sums), then `quickstart`.
"""

"""Tiny experiments, a model of 0.3 million parameters with data that it learns in minutes; and the rows of GSM8K.

Read `tiny` (model, tokenizer and sums), then `quickstart`; `gsm8k` is for models of real size.
"""

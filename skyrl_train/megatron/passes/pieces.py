"""Limits of the memory that the head (head.py) takes for logits. Imports nothing: a forecast reads them too."""

PIECE_BYTES = 2**30
"""Logits of a piece, with the float32 copies that torch computes with. Each piece reads and writes the whole float32
gradient of the weight, so smaller ones take longer."""
FREE_SHARE = 0.1
"""Fraction of the device's memory that kept logits leave free, for what is not known in advance: communicators of the
first backward pass, gaps between allocations."""

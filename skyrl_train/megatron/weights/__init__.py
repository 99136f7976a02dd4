"""Weights leaving the ranks: Hugging Face names, gathering, files and verification. Read `export`, then `proof` and
`save`.
"""

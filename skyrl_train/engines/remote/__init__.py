"""Running vLLM servers as engines.

Read `engine`, then `client` and `lifecycle`.
"""

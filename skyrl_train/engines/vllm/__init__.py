"""A vLLM engine in its own actor. Read `engine`, then `core`, `requests` and `weights`. `compat` holds what
differs between vLLM versions.
"""

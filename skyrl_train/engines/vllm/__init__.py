"""A vLLM engine in an actor of its own. Read `engine`, then `core`, `requests` and `weights`. `compat` holds what
differs between vLLM versions.
"""

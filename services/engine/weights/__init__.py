"""Loads a checkpoint into memory, shared between processes or split across ranks.

Does not depend on the cache or on steps.
"""

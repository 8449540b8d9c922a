"""KV cache pages, and the tiers to which they are evicted when the pool is full.

Does not depend on models, the tokens of sequences, or transfers.
"""

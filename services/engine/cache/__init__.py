"""The pages of the KV cache, and where they go when the pool is full.

Knows nothing of models, sequences' tokens or transfers.
"""

"""Runs a model over a paged KV cache.

No gRPC, no Redis, no protobuf, no gateway; one thread owns it.
"""

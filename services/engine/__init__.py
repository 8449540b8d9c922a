"""Runs a model over a paged KV cache.

Must not import gRPC, Redis, protobuf, or the gateway. A single thread owns the engine.
"""

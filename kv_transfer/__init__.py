"""Moves KV pages between two page pools: protocol state machines, transports, and the gRPC Link.

Does not depend on models, requests, or the gateway, and computes nothing.
"""

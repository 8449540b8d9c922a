"""Moves pages between two page pools: protocol state machines, transports and the gRPC link.

Knows no model, no request and no gateway, and computes nothing.
"""

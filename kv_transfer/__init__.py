"""Moves pages between two page pools: protocol state machines, transports and the gRPC link."""

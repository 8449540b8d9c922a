"""Vectors of texts: embeddings, which prefill workers compute alone.

Plugs into a request's life beside answers: accepted, paid, traced and logged as they are, and never decoded.
"""

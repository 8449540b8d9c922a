"""Requests with a name: their journals, and clients that read them."""

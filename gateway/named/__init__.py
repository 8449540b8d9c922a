"""Requests with a name: their journals, and clients that read them.

The life of a request knows nothing of names: a generation fills a journal as it would answer a client.
"""

"""Responses that are kept for their tenants, and those that are generated in the background.

Built on the HTTP API and on named requests. The life of a request knows nothing of either.
"""

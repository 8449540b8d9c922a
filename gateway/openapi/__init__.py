"""Describes the HTTP API and does nothing: the OpenAPI document and what it is made of.

Nothing is checked by it: the bounds are those of `gateway.limits`.
"""

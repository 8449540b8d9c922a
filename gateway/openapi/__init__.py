"""Describes the HTTP API and does nothing: the OpenAPI document and what it is made of."""

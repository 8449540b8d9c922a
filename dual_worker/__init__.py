"""A worker process that can change its role between prefill and decode, with the same weights and pages.

Depends on both worker packages. They depend neither on each other nor on this package.
"""

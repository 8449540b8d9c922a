"""Computes prompts in chunks and streams their pages out.

Generates no token but the first, and knows no gateway's queue or routing.
"""

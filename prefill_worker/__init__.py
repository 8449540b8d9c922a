"""Computes prompts in chunks and streams their pages out.

Generates only the first token. Does not depend on the gateway's queue or routing.
"""

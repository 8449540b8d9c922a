"""Takes pages in and generates tokens by continuous batching.

Knows no gateway's queue or routing, and no prefill worker but as the sender of a handoff.
"""

"""Receives KV pages and generates tokens with continuous batching.

Does not depend on the gateway's queue or routing. Prefill workers appear only as senders of a handoff.
"""

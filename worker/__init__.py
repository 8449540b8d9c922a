"""The shared parts of prefill and decode workers: sessions, leases, metrics, and the engine interface.

Does not depend on any engine, nor on the prefill or decode worker.
"""

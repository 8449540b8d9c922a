"""What both kinds of workers are made of: sessions, leases, metrics, and the seam to an engine.

Knows no engine by name, and neither the prefill nor the decode worker.
"""

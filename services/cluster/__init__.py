"""The only code that talks to Redis: keys, leases, registry, placements, journals, files.

Redis holds hints and leases: nothing here decides what becomes of a request.
"""

"""The only code that talks to Redis: keys, leases, registry, placement."""

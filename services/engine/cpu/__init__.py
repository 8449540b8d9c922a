"""What computes on CPUs in place of the readable decoder."""

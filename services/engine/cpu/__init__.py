"""What computes on CPUs in place of the readable decoder.

Its results are those of `reference`, and no row's depend on the other rows of a step.
"""

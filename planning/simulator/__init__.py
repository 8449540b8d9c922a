"""A discrete-event run of the cluster's own policies over a recorded trace, under a virtual clock.

Knows no socket and no wall clock; it has no policy of its own.
"""

"""From a checkpoint to weights in memory, shared or split.

Knows no cache and no step.
"""

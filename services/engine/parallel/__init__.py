"""Several processes that compute one model together; docs/parallelism.md says how and why.

Scheduling knows nothing of it: rank 0 plans a step as if it were alone.
"""

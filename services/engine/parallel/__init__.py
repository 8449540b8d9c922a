"""Several processes that compute one model together; docs/parallelism.md says how and why."""

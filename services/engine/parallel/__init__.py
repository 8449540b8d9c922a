"""Runs one model on several processes. docs/parallelism.md explains how and why.

Scheduling is unaffected: rank 0 plans each step as if it were the only process.
"""

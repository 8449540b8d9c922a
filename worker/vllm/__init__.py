"""vLLM as a worker's engine: the only package that imports vLLM.

Nothing else knows how vLLM schedules; the rest of a worker sees the seam of `worker.engine`.
"""

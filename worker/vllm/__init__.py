"""vLLM as the engine of a worker. The only package that imports vLLM.

No other package depends on vLLM's scheduling. The rest of a worker uses the interface in `worker.engine`.
"""

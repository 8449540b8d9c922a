"""vLLM as a worker's engine: the only package that imports vLLM."""

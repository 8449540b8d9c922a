"""The names of the engines that a worker may have."""

NATIVE = "native"
"""This project's own."""
VLLM = "vllm"
ENGINES = (NATIVE, VLLM)

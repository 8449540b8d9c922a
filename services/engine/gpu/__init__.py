"""CUDA implementation of the engine: Triton kernels, their decoder, and its steps as CUDA graphs.

Does not depend on the scheduler or on transfers.
"""

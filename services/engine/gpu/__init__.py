"""The engine's path on CUDA devices: Triton kernels, the decoder made of them, and its decode steps as CUDA graphs.

Knows no scheduler and no transfer.
"""

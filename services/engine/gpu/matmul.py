"""Settings under which a row of a matrix product should not depend on how many rows there are, on CUDA devices.

What makes it depend is split-K: for few rows a library cuts the sums into parts, and joins them in another order. It
needs memory for that and a permission; here it gets neither. Proven on no device yet, so no model claims it.
"""

import os

import torch


def forbid_split_k() -> None:
    """For this process; must come before its first matrix product on a device."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    os.environ["CUBLASLT_WORKSPACE_SIZE"] = "1"
    torch.backends.cuda.preferred_blas_library("cublaslt")
    # Pairs of (sums in less precision, split-K).
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)

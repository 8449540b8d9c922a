"""Settings under which a row of a matrix product should not depend on how many rows there are, on CUDA devices.

What makes it depend is split-K: for few rows a library cuts the sums into parts, and joins them in another order. It
needs memory for that and a permission; here it gets neither. Tests hold it on the GPU they run on (so far H100, H200).
"""

import logging
import os
from collections.abc import Iterable

import torch

from services.engine.weights.linear import Linear

TRIED_ROWS = (1, 16, 256)

logger = logging.getLogger(__name__)


def forbid_split_k() -> None:
    """For this process; must come before its first matrix product on a device."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    os.environ["CUBLASLT_WORKSPACE_SIZE"] = "1"
    torch.backends.cuda.preferred_blas_library("cublaslt")
    matmul = torch.backends.cuda.matmul
    try:
        # Pairs of (sums in less precision, split-K).
        matmul.allow_bf16_reduced_precision_reduction = (False, False)
        matmul.allow_fp16_reduced_precision_reduction = (False, False)
    except (RuntimeError, TypeError):  # torch before 2.10 knows the first of each pair alone
        permit_split_k()


def permit_split_k() -> None:
    """For this process."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def permit_where_needed(linears: Iterable[Linear], *, dtype: torch.dtype, device: torch.device) -> None:
    """Tries each layer with a few numbers of rows, and permits split-K if one is refused for want of another way.

    torch raises RuntimeError there: the library that can do without is the only one it may ask.
    """
    for linear in linears:
        x = torch.zeros(TRIED_ROWS[-1], linear.in_features, dtype=dtype, device=device)
        try:
            for num_rows in TRIED_ROWS:
                linear(x[:num_rows])
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            logger.warning("rows of matrix products may depend on each other's number: %s", error)
            permit_split_k()
            return

"""Settings that make a row of a matrix product independent of the number of rows on CUDA devices.

Split-K causes the dependency: for few rows, the library splits sums and adds the parts in a different order. Split-K
needs workspace memory and a permission, and these settings deny both. Tests verify the independence on their GPU (so
far H100 and H200).
"""

import logging
import os
from collections.abc import Iterable

import torch

from services.engine.weights.linear import Linear

TRIED_ROWS = (1, 16, 256)

logger = logging.getLogger(__name__)


def forbid_split_k() -> None:
    """Disables split-K in this process. Call it before the first matrix product on a device."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    os.environ["CUBLASLT_WORKSPACE_SIZE"] = "1"
    torch.backends.cuda.preferred_blas_library("cublaslt")
    matmul = torch.backends.cuda.matmul
    try:
        # Pairs of (reduced-precision sums, split-K).
        matmul.allow_bf16_reduced_precision_reduction = (False, False)
        matmul.allow_fp16_reduced_precision_reduction = (False, False)
    except (RuntimeError, TypeError):  # torch before 2.10 only accepts the first element of each pair
        permit_split_k()


def permit_split_k() -> None:
    """Permits split-K in this process."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def permit_where_needed(linears: Iterable[Linear], *, dtype: torch.dtype, device: torch.device) -> None:
    """Runs each layer with a few row counts. Permits split-K if the library has no other algorithm for one of them.

    torch raises RuntimeError in that case, because it may only use cuBLASLt, the library that supports these settings.
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

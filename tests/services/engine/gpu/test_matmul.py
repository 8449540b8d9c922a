from collections.abc import Iterator

import pytest
import torch

from services.engine.gpu.matmul import TRIED_ROWS, forbid_split_k, permit_where_needed
from services.engine.weights.linear import TorchLinear


class Refused(TorchLinear):
    """A layer whose product the library cannot do without split-K."""

    def __call__(self, x, *, out_dtype=None):
        if len(x) > 1:
            raise RuntimeError("allow_splitk=False requires the cuBLASLt backend")
        return super().__call__(x)


@pytest.fixture(autouse=True)
def settings_as_before(monkeypatch) -> Iterator[None]:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda name: None)  # a CPU build has none
    matmul = torch.backends.cuda.matmul
    yield
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = True


def allowed():
    matmul = torch.backends.cuda.matmul
    return [getattr(matmul, f"allow_{name}_reduced_precision_reduction_split_k") for name in ("bf16", "fp16")]


def test_split_k_stays_forbidden_where_all_products_can_do_without(caplog):
    forbid_split_k()
    weights = [torch.zeros(6, 4), torch.zeros(331, 6)]
    linears = [TorchLinear(weight, None) for weight in weights]
    permit_where_needed(linears, dtype=torch.float32, device=torch.device("cpu"))
    assert allowed() == [False, False]
    assert not caplog.records


def test_split_k_is_permitted_where_a_product_needs_it(caplog):
    forbid_split_k()
    linears = [Refused(torch.zeros(6, 4), None)]
    permit_where_needed(linears, dtype=torch.float32, device=torch.device("cpu"))
    assert allowed() == [True, True]
    assert "requires the cuBLASLt backend" in caplog.text


def test_no_memory_is_no_reason_to_permit_it():
    class Large(TorchLinear):
        def __call__(self, x, *, out_dtype=None):
            raise torch.OutOfMemoryError(f"{len(x)} of {TRIED_ROWS}")

    with pytest.raises(torch.OutOfMemoryError):
        permit_where_needed([Large(torch.zeros(6, 4), None)], dtype=torch.float32, device=torch.device("cpu"))

"""Where kernels run: interpreted on the CPU where there is no GPU, compiled on one where there is (`make test-gpu`)."""

import importlib.util
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]  # no wheel for this system


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if is_interpreted != (request.param == "cpu"):
        pytest.skip("kernels are interpreted in this process" if is_interpreted else "kernels are compiled here")
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def rounding_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter cuts bits off where a device rounds to the nearest bfloat16, ties to even."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_as_devices_do(values, from_type, to_type, rounding):
        kinds = (from_type.name, to_type.name)
        if kinds == ("bf16", "fp32"):
            return values.astype(np.uint32) << 16
        if kinds != ("fp32", "bf16"):
            return convert(values, from_type, to_type, rounding)
        bits = values.view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        return np.where(is_nan, np.uint32(0x7FC0), rounded).astype(np.uint16)

    monkeypatch.setattr(interpreter, "_convert_float", convert_as_devices_do)


@pytest.fixture(autouse=True)
def numbers_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter takes a tensor of one number for one, which numpy does not since 2.4."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor, scope):
        patch(tensor, scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_with_index)


@pytest.fixture(autouse=True)
def rows_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """On devices a row of a product is the same wherever it stands; in numpy's BLAS it is not so on some CPUs."""
    from triton.runtime import interpreter

    def create_dot(builder, a, b, d, input_precision, max_num_imprecise_acc):
        product = np.einsum("...ik,...kj->...ij", a.data, b.data, dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)

import pytest
import torch

from services.engine.kernels.library import load_kernels
from services.engine.weights.linear import TorchLinear, pack_linear

# (out features, in features): whole and broken panels, odd k, more than one block of k.
SHAPES = [(1, 1), (7, 3), (32, 32), (33, 64), (70, 75), (96, 520), (331, 64), (64, 1408)]


def make(shape, dtype, *, with_bias):
    generator = torch.Generator().manual_seed(shape[0])
    weight = torch.randn(shape, generator=generator).to(dtype)
    bias = torch.randn(shape[0], generator=generator).to(dtype) if with_bias else None
    x = torch.randn(131, shape[1], generator=generator).to(dtype)
    return weight, bias, x


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [True, False])
def test_packed_layer_equals_the_product(shape, dtype, with_bias):
    weight, bias, x = make(shape, dtype, with_bias=with_bias)
    linear = pack_linear(load_kernels(), weight, bias)
    expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    # Sums of k products of unit variance: an absolute error relative to their spread.
    tolerance = 1e-6 * shape[1] ** 0.5 * 8
    wide = linear(x, out_dtype=torch.float32)
    torch.testing.assert_close(wide.double(), expected, atol=tolerance, rtol=1e-5)
    assert torch.equal(linear(x), wide.to(dtype))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_is_bitwise_independent_of_the_others(shape, dtype):
    weight, bias, x = make(shape, dtype, with_bias=True)
    linear = pack_linear(load_kernels(), weight, bias)
    alone = torch.cat([linear(row[None]) for row in x])
    for rows in (*range(1, 65), 97, 131):
        # The rows' neighbours are poison: whatever touches them would show.
        poisoned = torch.full((rows, shape[1]), float("nan"), dtype=dtype)
        place = rows // 2
        poisoned[place] = x[place]
        assert torch.equal(linear(x[:rows]), alone[:rows])
        assert torch.equal(linear(poisoned)[place], alone[place])


def test_result_does_not_depend_on_the_number_of_threads():
    for dtype in (torch.float32, torch.bfloat16):
        weight, bias, x = make((331, 96), dtype, with_bias=True)
        linear = pack_linear(load_kernels(), weight, bias)
        one = linear(x)
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(linear(x), one)
            assert torch.equal(pack_linear(load_kernels(), weight, bias)(x), one)
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(70, 75), (96, 96), (64, 1408)])
def test_rows_of_a_long_prompt_are_shared_among_threads_with_the_bits_of_one(shape, dtype):
    """More rows than fit in a cache together, with whole and broken tiles, for more threads than there are parts."""
    weight, bias, _ = make(shape, dtype, with_bias=True)
    linear = pack_linear(load_kernels(), weight, bias)
    x = torch.randn(1030, shape[1], generator=torch.Generator().manual_seed(3)).to(dtype)
    few = torch.cat([linear(part) for part in x.split(64)])
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            for rows in (97, 128, 1030):
                assert torch.equal(linear(x[:rows]), few[:rows])
    finally:
        torch.set_num_threads(1)


def test_special_values_pass_through():
    linear = pack_linear(load_kernels(), torch.eye(64).bfloat16(), None)
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    x[0, :4] = torch.tensor([-2.0, 1e38, float("inf"), 3.0])
    out = linear(x)[0]
    assert out[0].isnan()  # zero times infinity, as in any product
    x[0, 2] = 0
    assert torch.equal(linear(x), x)


def test_torch_layer_has_the_same_interface():
    weight, bias, x = make((33, 64), torch.bfloat16, with_bias=True)
    linear = TorchLinear(weight, bias)
    assert (linear.in_features, linear.out_features) == (64, 33)
    assert linear(x).dtype == torch.bfloat16
    assert linear(x, out_dtype=torch.float32).dtype == torch.float32


def test_no_rows_is_an_empty_result():
    weight, _, x = make((33, 64), torch.float32, with_bias=False)
    assert pack_linear(load_kernels(), weight, None)(x[:0]).shape == (0, 33)

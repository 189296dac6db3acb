"""The formulas of INT8 weights."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from service.errors import ModelError
from service.tensor.cpu.backend import CpuBackend
from service.tensor.quantized import GROUP_SIZES, QuantizedWeight, join, quantize


def weights(seed: int, rows: int, columns: int, scale: float) -> NDArray[np.float32]:
    """Normal values with a few outliers."""
    rng = np.random.default_rng(seed)
    found = rng.standard_normal((rows, columns), np.float32) * np.float32(scale)
    found[rng.random(found.shape) < 0.02] *= 20
    return found


@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 9),
    columns=st.integers(1, 300),
    group_size=st.sampled_from(GROUP_SIZES),
    exponent=st.floats(-9, 4),
)
def test_no_weight_is_off_by_more_than_the_bound(
    seed: int, rows: int, columns: int, group_size: int, exponent: float
) -> None:
    weight = weights(seed, rows, columns, 10.0**exponent)
    quantized = quantize(weight, group_size)

    assert quantized.scales.shape == (rows, -(-columns // group_size))
    scales = np.repeat(quantized.scales.astype(np.float64), group_size, axis=1)[:, :columns]
    bound = scales / 2 * (1 + 1e-6) + 127 * 2.0**-25
    assert (np.abs(weight - quantized.dequantize(np.float64)) <= bound).all()


@given(seed=st.integers(0, 2**32 - 1), group_size=st.sampled_from(GROUP_SIZES))
def test_what_is_quantised_again_stays_as_it_is(seed: int, group_size: int) -> None:
    once = quantize(weights(seed, 3, 200, 0.05), group_size)
    again = quantize(once.dequantize(), group_size)

    assert np.array_equal(once.values, again.values)


def test_rows_of_zeros_and_narrow_dtypes() -> None:
    weight = np.zeros((3, 70), bfloat16)
    weight[1, 65] = 1
    quantized = quantize(weight, 64)

    assert quantized.dequantize()[1, 65] == pytest.approx(1, rel=1e-3)
    assert np.count_nonzero(quantized.values) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e8])
def test_weights_without_a_scale_are_refused(bad: float) -> None:
    weight = np.ones((4, 40), np.float32)
    weight[3, 39] = bad
    with pytest.raises(ModelError, match=r"\[4, 40\] holds NaN"):
        quantize(weight, 32)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_the_cpu_multiplies_as_with_the_dequantised_weight(group_size: int, rows: int) -> None:
    backend = CpuBackend()
    parts = [weights(1, 40, 150, 0.1), weights(2, 24, 150, 0.1)]
    bias = [np.arange(40, dtype=np.float32), np.ones(24, np.float32)]
    x = np.random.default_rng(0).standard_normal((rows, 150), np.float32)
    by_floats = backend.linear(parts, bias, group_size=group_size)
    by_values = backend.linear([quantize(part, group_size) for part in parts], bias)
    wanted = join([quantize(part, group_size) for part in parts]).dequantize(np.float64)

    for linear in (by_floats, by_values):
        assert isinstance(linear.weight, QuantizedWeight)
        assert linear.num_bytes == 64 * 150 + 64 * -(-150 // group_size) * 2 + 64 * 4
        np.testing.assert_allclose(linear.project(x), x @ wanted.T + np.concatenate(bias), atol=1e-4)
        np.testing.assert_allclose(linear.rows(np.array([63, 0])), wanted[[63, 0]], rtol=1e-6)

"""Quantization helpers against numbers worked out by hand and against exact arithmetic."""

from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xnnfast import quantization
from xnnfast.quantization import PerBlock, PerChannel, PerTensor, PerToken

F32 = np.float32


def value(datatype, scale=1.0, zero_point=0, **more):
    return SimpleNamespace(datatype=datatype, quantization=PerTensor(scale, zero_point), **more)


def test_quantize_rounds_half_to_even_and_saturates():
    real = F32([0.5, 1.5, 2.5, -0.5, 1e9, -np.inf, np.inf])
    stored = quantization.quantize(real, value("qint8"))
    assert stored.dtype == np.int8
    assert stored.tolist() == [0, 2, 2, 0, 127, -128, 127]


def test_quantize_gives_the_highest_number_for_nan():
    assert quantization.quantize(F32([np.nan]), value("qint8", 1, -5)).tolist() == [127]
    assert quantization.quantize(F32([np.nan]), value("quint8", 1, 200)).tolist() == [255]


def test_quantize_adds_the_zero_point_after_rounding():
    # 0.5 -> 0 -> 3; rounding 3.5 to even would give 4.
    assert quantization.quantize(F32([0.5, 1.0, -1.0]), value("qint8", 1, 3)).tolist() == [3, 4, 2]
    assert quantization.quantize(F32([1.0]), value("qint8", 0.5, 3)).tolist() == [5]


@pytest.mark.parametrize(("datatype", "low", "high"), [("qint8", -128, 127), ("quint8", 0, 255)])
def test_quantize_inverts_dequantize_at_every_number(datatype, low, high):
    for zero_point in (low, 0, 3, high):
        numbers = np.arange(low, high + 1).astype(np.int8 if low else np.uint8)
        param = value(datatype, 0.037, zero_point)
        real = quantization.dequantize(numbers, param)
        assert real.dtype == np.float32
        np.testing.assert_array_equal(real, (numbers.astype(F32) - zero_point) * F32(0.037))
        np.testing.assert_array_equal(quantization.quantize(real, param), numbers)


def test_quantize_keeps_all_bits_of_a_bias():
    param = value("qint32", 2.0**-10)
    assert quantization.quantize(np.array([16777217 / 1024, -1e30]), param).tolist() == [16777217, -(2**31)]


def test_per_channel_scales_go_along_their_axis():
    param = SimpleNamespace(datatype="qcint8", quantization=PerChannel(F32([1, 2, 4]), 1))
    stored = np.array([[4, 4, 4], [8, 8, 8]], np.int8)
    real = quantization.dequantize(stored, param)
    assert real.tolist() == [[4, 8, 16], [8, 16, 32]]
    np.testing.assert_array_equal(quantization.quantize(real, param), stored)


def test_low_nibble_is_the_even_element():
    assert quantization.unpack_int4(np.array([[0x98]], np.uint8), 2).tolist() == [[0, 1]]
    assert quantization.unpack_int4(np.array([[0x89]], np.uint8), 2).tolist() == [[1, 0]]
    assert quantization.unpack_int4(np.array([[0xF0, 0x81]], np.uint8), 3).tolist() == [[-8, 7, -7]]


@given(st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_pack_int4_inverts_unpack_int4(inner, seed):
    numbers = np.random.default_rng(seed).integers(-8, 8, (3, inner)).astype(np.int8)
    packed = quantization.pack_int4(numbers)
    assert packed.dtype == np.uint8
    assert packed.shape == (3, (inner + 1) // 2)
    np.testing.assert_array_equal(quantization.unpack_int4(packed, inner), numbers)


@pytest.mark.parametrize("number", [-9, 8])
def test_pack_int4_refuses_what_has_no_4_bits(number):
    with pytest.raises(ValueError, match=f"-8..7.*{number}"):
        quantization.pack_int4([0, number])


def test_block_scales_are_bfloat16_row_by_row():
    scales = quantization.f32_to_bf16(F32([1, 2, 4, 8]))
    param = SimpleNamespace(datatype="qbint4", shape=(2, 64), quantization=PerBlock(scales, 0, 32))
    packed = np.full((2, 32), 0x99, np.uint8)
    real = quantization.dequantize(packed, param)
    assert real.shape == (2, 64)
    assert real[:, ::32].tolist() == [[1, 2], [4, 8]]
    assert (real[:, :32] == real[:, :1]).all()


def test_f32_to_bf16_rounds_to_nearest_even():
    one = 0x3F80
    # 1 + 1/256 is the midpoint of 1 and 1 + 1/128.
    assert quantization.f32_to_bf16(F32([1, 1 + 1 / 256, 1 + 3 / 256])).tolist() == [one, one, one + 2]
    assert quantization.f32_to_bf16(F32([np.inf, -0.0])).tolist() == [0x7F80, 0x8000]
    nan = np.array([0x7F800001, 0xFFFFFFFF], np.uint32).view(F32)
    assert np.isnan(quantization.bf16_to_f32(quantization.f32_to_bf16(nan))).all()
    # Rounding may reach infinity.
    assert quantization.f32_to_bf16(np.finfo(F32).max).tolist() == 0x7F80


@given(st.integers(0, 0xFFFF))
def test_f32_to_bf16_inverts_bf16_to_f32(bits):
    real = quantization.bf16_to_f32(np.uint16(bits))
    if not np.isnan(real):
        assert quantization.f32_to_bf16(real) == bits


def test_quantize_refuses_what_has_no_parameters():
    for datatype in ("fp32", "qdint8"):
        with pytest.raises(TypeError, match=datatype):
            quantization.quantize([1.0], SimpleNamespace(datatype=datatype, quantization=PerToken(1)))


def test_rows_have_their_own_parameters():
    rows = F32([[1, 2], [100, 200], [0.001, 0.002], [0, 0], [-3, -1]])
    stored, scale, zero_point = quantization.quantize_rows(rows, 1)
    assert (stored.dtype, scale.dtype, zero_point.dtype) == (np.int8, np.float32, np.int32)
    assert scale.shape == zero_point.shape == (5, 1)
    real = (stored - zero_point).astype(F32) * scale
    assert (np.abs(real - rows) <= np.abs(rows).max(axis=1, keepdims=True) / 255).all()
    # A range of positive numbers starts at 0, of negative ones ends there; a row of zeros takes the high end.
    assert zero_point.ravel().tolist() == [-128, -128, -128, 127, 127]
    # 1 would be a tie, 127.5 steps of 2 / 255, but the factor is the scale's reciprocal, a hair below 127.5.
    assert stored[0].tolist() == [-1, 127]
    assert scale[3] == 1
    assert (real[3] == 0).all()


def test_rows_span_the_trailing_axes():
    array = np.arange(24, dtype=F32).reshape(2, 3, 4)
    assert quantization.quantize_rows(array, 2)[1].shape == (2, 1, 1)
    assert quantization.quantize_rows(array, 3)[1].shape == (1, 1, 1)
    assert quantization.quantize_rows(array[0, 0], 1)[1].shape == (1,)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=8))
def test_rows_keep_zero_exact_and_stay_within_half_a_step(row):
    row = F32(row)
    row[np.abs(row) < 1e-30] = 0
    stored, scale, zero_point = quantization.quantize_rows(row, 1)
    zero = quantization.quantize_rows(np.append(row, F32(0)), 1)
    assert zero[0][-1] == zero[2][0]
    for number, x in zip(stored, row):
        error = abs((Fraction(int(number)) - int(zero_point[0])) * Fraction(float(scale[0])) - Fraction(float(x)))
        # The zero point is rounded, too, so that one end of the range may be cut by up to half a step.
        assert error <= Fraction(float(scale[0])) * Fraction(1001, 1000)


def test_a_nan_spoils_its_row_only():
    stored, scale, _ = quantization.quantize_rows(F32([[np.nan, 1], [1, 2]]), 1)
    assert np.isnan(scale[0]) and np.isfinite(scale[1])
    assert stored[1].tolist() == quantization.quantize_rows(F32([[1, 2]]), 1)[0][0].tolist()


def test_half_rows_use_a_half_factor():
    rows = np.float16([[1, 3]])
    stored, scale, zero_point = quantization.quantize_rows(rows, 1)
    # 255 / 3 = 85 has a half, so that both roads meet.
    assert stored.tolist() == [[-43, 127]] and zero_point.tolist() == [[-128]]
    assert scale[0, 0] == F32(1) / F32(85)

"""NaN, infinities and denormals, as this XNNPACK treats them; docs/operators.md says so operator by operator.

Where kernels of different instruction sets differ, all that one of them gives is allowed here.
"""

import ctypes
import platform
import struct
import sys

import numpy as np
import pytest
from op_cases import Q8, case, told
from small import built, f32, ran

import xnnfast as xf
from xnnfast import GraphBuilder, PerChannel, PerTensor, PerToken, Runtime
from xnnfast.ops import OPS
from xnnfast.quantization import f32_to_bf16
from xnnfast.reference.elementwise import UNARY

INF, NAN, TINY = np.inf, np.nan, np.float32(1e-40)
FLOATS = {"fp32": np.float32, "fp16": np.float16}
#: More than a vector register, so that main loop and remainder are both seen.
SPECIAL = np.array([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0] * 10)


def one(name, x, datatype="fp32", **options):
    arguments = {"clamp": (-1, 1.5), "leaky_relu": (.1,), "elu": (.7,)}.get(name, ())
    return ran(lambda b: getattr(b, name)(b.input(x.shape, datatype), *arguments, **options), x)


# ---- element by element


@pytest.mark.parametrize("datatype", FLOATS)
@pytest.mark.parametrize("name", UNARY)
def test_unary_operators_treat_special_values_as_numpy_does(name, datatype):
    x = SPECIAL.astype(FLOATS[datatype])
    got = one(name, x, datatype)
    with np.errstate(all="ignore"):
        want = UNARY[name](x.astype(np.float64), {"negative_slope": .1, "alpha": .7})
    if name == "clamp":
        want = np.clip(want, -1, 1.5)
    fine = np.isclose(got, want, rtol=2e-3, atol=1e-3, equal_nan=True)
    # What the rows name.
    if name == "clamp" and datatype == "fp16":
        fine |= np.isnan(x) & (got == -1)
    if name == "square_root":
        fine |= (x == INF) & np.isnan(got)
        if datatype == "fp16":
            fine |= (np.isnan(got) & (x == 0)) | ((x < 0) & (got == 0))
    if name == "log" and datatype == "fp32":
        fine |= (np.isnan(x) | (x == INF)) & (got > 88) & (got < 89)
    if name == "reciprocal_square_root" and datatype == "fp32":
        fine |= ((x == INF) | (x == 0)) & np.isnan(got)
    assert fine.all(), list(zip(x[~fine], got[~fine], want[~fine]))
    if not np.isnan(got[np.isnan(x)]).all():
        assert "NaN gives" in OPS[name].nan or "lower limit" in OPS[name].nan


@pytest.mark.parametrize("name", ["add", "subtract", "multiply", "divide", "prelu"])
@pytest.mark.parametrize("datatype", FLOATS)
def test_binary_operators_keep_nan(name, datatype):
    x = np.array([NAN, 1, NAN, INF, -INF, -1] * 9, FLOATS[datatype])
    y = np.array([1, NAN, NAN, 1, INF, NAN] * 9, FLOATS[datatype])
    got = ran(lambda b: getattr(b, name)(b.input(x.shape, datatype), b.input(y.shape, datatype)), x, y)
    want = {"prelu": lambda: np.where(x < 0, x * y, x)}.get(name, lambda: getattr(np, name)(x, y))
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(got, want())
    assert OPS[name].nan == "NaN stays NaN."


@pytest.mark.parametrize("name", ["minimum", "maximum"])
@pytest.mark.parametrize("datatype", FLOATS)
def test_the_second_of_a_nan_and_a_number_stays(name, datatype):
    x, y = (np.array(numbers * 9, FLOATS[datatype]) for numbers in ([NAN, 1, NAN], [1, NAN, NAN]))
    got = ran(lambda b: getattr(b, name)(b.input(x.shape, datatype), b.input(y.shape, datatype)), x, y)
    np.testing.assert_array_equal(got, y)
    # A NaN that is stretched over the other operand stays, on either side.
    for first, second in ((x[:1], y[:1].repeat(30)), (y[:1].repeat(30), x[:1])):
        got = ran(lambda b, first=first, second=second: getattr(b, name)(
            b.input(first.shape, datatype), b.input(second.shape, datatype)), first, second)
        assert np.isnan(got).all()
    assert "of a NaN stretched over the other operand, NaN" in OPS[name].nan


@pytest.mark.parametrize("name", ["static_transpose", "static_reshape", "static_slice", "static_constant_pad",
                                  "concatenate2", "copy"])
@pytest.mark.parametrize("datatype", FLOATS)
def test_what_is_moved_keeps_its_bits(name, datatype):
    made = case(name, (datatype,) * (3 if name == "concatenate2" else 2))
    integer = {"fp32": np.uint32, "fp16": np.uint16}[datatype]
    # Payloads of NaN, denormals, signs: every pattern is as good as another.
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, np.iinfo(integer).max, value.shape, integer, endpoint=True).view(FLOATS[datatype])
              for value in made.graph.inputs]
    (got,) = Runtime(made.graph).run(*arrays)
    (want,) = xf.reference.run(made.graph, *arrays)
    np.testing.assert_array_equal(got.view(integer), want.view(integer))


# ---- a NaN in one sample is no matter of the others


ROWS = sorted(name for name, op in OPS.items() if op.kind is not None and name not in (
    "static_reshape", "static_slice", "batch_matrix_multiply", "static_transpose"))


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("bad", [NAN, INF])
def test_other_samples_are_untouched(name, bad):
    for types in OPS[name].datatypes:
        options = {"constant": True, "second": (5,)} if name == "prelu" else {}
        made = case(name, types, **options)
        if types[0] not in (*FLOATS, "qdint8") or types[-1] == "int32":
            continue
        arrays = made.arrays(batch=3)
        runtime = Runtime(made.graph)
        want = runtime.run(*arrays)
        assert made.has_batch
        poisoned = [array.copy() for array in arrays]
        for array, (_, _, _, free) in zip(poisoned, made.feeds):
            if free:
                array[1].reshape(-1)[::3] = bad
        with told(types):
            for got, each in zip(runtime.run(*poisoned), want):
                np.testing.assert_array_equal(got[[0, 2]], each[[0, 2]])


@pytest.mark.parametrize("name", ["max_pooling2d", "average_pooling2d", "argmax_pooling2d", "static_resize_bilinear2d",
                                  "global_average_pooling2d", "depthwise_conv2d"])
def test_other_channels_are_untouched(name):
    made = case(name, OPS[name].datatypes[0])
    (x,) = made.arrays()
    channels = x.shape[3]
    runtime = Runtime(made.graph)
    want = runtime.run(x)
    poisoned = x.copy()
    poisoned[..., 1] = NAN
    for got, each in zip(runtime.run(poisoned), want):
        others = [channel for channel in range(each.shape[3]) if channel * channels // each.shape[3] != 1]
        np.testing.assert_array_equal(got[..., others], each[..., others])


@pytest.mark.parametrize("name", ["global_average_pooling2d", "static_resize_bilinear2d"])
def test_means_and_interpolation_keep_nan(name):
    made = case(name, ("fp32", "fp32"))
    (x,) = made.arrays()
    x[0] = NAN
    (got,) = Runtime(made.graph).run(x)
    assert np.isnan(got[0]).all() and np.isfinite(got[1]).all()


# ---- quantizing


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("datatype", Q8)
def test_quantizing_nan_and_infinities(source, datatype):
    x = np.array([NAN, INF, -INF, 1e4, -1e4] * 7, FLOATS[source])
    value = PerTensor(.5, 10)
    got = ran(lambda b: b.convert(b.input(x.shape, source), datatype, value), x)
    low, high = {"qint8": (-128, 127), "quint8": (0, 255)}[datatype]
    np.testing.assert_array_equal(got.reshape(7, 5)[:, 1:], np.tile([high, low, high, low], (7, 1)))
    # The vector code gives the highest number, the reference code the stored 0.
    assert set(got.reshape(7, 5)[:, 0].tolist()) <= {high, 0}


def test_dynamic_quantization_of_rows_with_nan_and_infinities():
    def build(b):
        ones = b.constant(np.full((2, 4), 127, np.int8), "qcint8", PerChannel(f32(1 / 127, 1 / 127), 0))
        return b.fully_connected(b.convert(b.input((4, 4)), "qdint8", PerToken(1)), ones, f32(.5, -.5))

    x = f32([1, 2, 3, 4], [NAN, 1, 2, 3], [INF, 1, 2, 3], [0, 0, 0, 0])
    got = ran(build, x)
    np.testing.assert_allclose(got[0], [10.5, 9.5], rtol=1e-2)
    # A row of zeros is its bias exactly; what the lost rows hold is not promised.
    np.testing.assert_array_equal(got[3], [.5, -.5])


# ---- denormals


@pytest.mark.parametrize("name, other", [("multiply", 1), ("add", TINY), ("divide", 1)])
def test_denormals_count_as_zero_while_the_engine_runs(name, other):
    x, y = np.full(40, TINY), np.full(40, other, np.float32)
    got = ran(lambda b: getattr(b, name)(b.input(x.shape), b.input(y.shape)), x, y)
    np.testing.assert_array_equal(got, np.zeros(40))


def test_results_that_would_be_denormal_are_zero():
    got = ran(lambda b: b.multiply(b.input((40,)), f32([1e-20])), np.full(40, 1e-19, np.float32))
    np.testing.assert_array_equal(got, np.zeros(40))


@pytest.mark.parametrize("threads", [1, 2])
def test_the_callers_floating_point_mode_is_restored(threads):
    def denormals_count():
        return (np.full(4, TINY) * np.float32(.5) > 0).all()

    runtime = Runtime(built(lambda b: b.fully_connected(b.input((64, 64)), np.ones((64, 64), np.float32))).graph(),
                      threads=threads)
    assert denormals_count()
    runtime.run(np.full((64, 64), TINY))
    assert denormals_count()
    with pytest.raises(xf.ShapeError):
        runtime.run(np.ones((64, 63), np.float32))
    assert denormals_count()


#: Machine -> byte of the control word in glibc's fenv_t, and its bits.
CONTROL_WORDS = {"x86_64": (28, 0x8040), "aarch64": (0, 1 << 24)}


class FloatingPointMode:
    """Denormals count as zero in this thread, as some libraries leave it: bits of a saved environment."""

    def __enter__(self):
        self.libm = ctypes.CDLL("libm.so.6")
        self.saved = ctypes.create_string_buffer(64)
        assert self.libm.fegetenv(self.saved) == 0
        place, bits = CONTROL_WORDS[platform.machine()]
        changed = ctypes.create_string_buffer(self.saved.raw, 64)
        (word,) = struct.unpack_from("<I", changed, place)
        struct.pack_into("<I", changed, place, word | bits)
        assert self.libm.fesetenv(changed) == 0

    def __exit__(self, *exc):
        self.libm.fesetenv(self.saved)


@pytest.mark.skipif(platform.machine() not in CONTROL_WORDS or sys.platform != "linux",
                    reason="where the mode lies in fenv_t is not known")
def test_a_caller_that_takes_denormals_for_zero():
    # In this mode the engine's own folding of a clamp would turn padding 1, read as a float, into 0.
    weights = np.ones((2, 3, 3, 2), np.float32) / 18

    def build(b):
        return b.clamp(b.conv2d(b.input((1, 4, 4, 2)), weights, padding=1), 0, 6)

    x = np.arange(32, dtype=np.float32).reshape(1, 4, 4, 2) - 4
    (want,) = Runtime(built(build).graph()).run(x)
    with FloatingPointMode():
        assert (np.full(4, TINY) * np.float32(1) == 0).all()
        (got,) = Runtime(built(build).graph()).run(x)
        # It is left as it was.
        assert (np.full(4, TINY) * np.float32(1) == 0).all()
    assert (np.full(4, TINY) * np.float32(1) != 0).all()
    np.testing.assert_array_equal(got, want)


# ---- check_finite


def checked(build):
    return Runtime(built(build).graph(), check_finite=True)


@pytest.mark.parametrize("datatype", [*FLOATS, "bf16"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_check_finite_looks_at_inputs(datatype, bad):
    runtime = checked(lambda b: b.clamp(b.add(b.input((2, 3), datatype), b.input((2, 3), datatype)), 0, 6))
    good = np.ones((2, 3), np.float32)
    wrong = good.copy()
    wrong[1, 1] = bad
    if datatype == "bf16":
        good, wrong = (f32_to_bf16(each).view(runtime.inputs[0].dtype) for each in (good, wrong))
    else:
        good, wrong = good.astype(FLOATS[datatype]), wrong.astype(FLOATS[datatype])
    runtime.run(good, good)
    with pytest.raises(xf.NotFiniteError, match=f"input 1 holds 1 values that are not finite, the first is {bad}"):
        runtime.run(good, wrong)
    # It is the same runtime afterwards.
    runtime.run(good, good)


def test_check_finite_looks_at_outputs():
    runtime = checked(lambda b: (b.log(b.input((4,))), b.square(b.input((4,)))))
    fine = f32(1, 2, 3, 4)
    runtime.run(fine, fine)
    with pytest.raises(xf.NotFiniteError, match="output 0 holds 2 values that are not finite, the first is -inf"):
        runtime.run(f32(0, 1, 0, 1), fine)
    with pytest.raises(xf.NotFiniteError, match="output 1 holds 1 values that are not finite, the first is inf"):
        runtime.run(fine, f32(1e30, 1, 1, 1))


def test_check_finite_leaves_integers_alone():
    q = PerTensor(1.0, 0)
    runtime = checked(lambda b: b.add(b.input((2,), "qint8", q), b.input((2,), "qint8", q), quantization=q))
    assert runtime.run(np.int8([127, -128]), np.int8([127, -128]))[0].tolist() == [127, -128]


def test_without_it_nothing_is_scanned():
    b = GraphBuilder()
    b.output(b.negate(b.input((2,))))
    assert np.isnan(Runtime(b.graph()).run(f32(NAN, 1))[0][0])

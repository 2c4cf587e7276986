"""Kernel self-test: the kernels that XNNPACK selects on this CPU, each against NumPy.

In comes nothing but the machine; out comes one result per family of kernels. Shapes hit full tiles, tiles that
lack all but one row or column, and what is known to have gone wrong in this XNNPACK: fp16 layers of 64 and more
outputs, and 8-bit convolutions of more than 64 channels whose pixels leave a rest of one.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from . import reference
from ._runtime import Runtime
from .builder import GraphBuilder
from .datatypes import DATATYPES
from .errors import XnnfastError, XnnpackError
from .ops import OPS
from .quantization import PerBlock, PerChannel, PerTensor, PerToken, f32_to_bf16

__all__ = ["Result", "families", "run"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
#: Makes and compares; called with a Patient.
Check: TypeAlias = Callable[["Patient"], None]

Q8 = ("qint8", "quint8")
PLAIN = ("fp32", "fp16", "bf16", *Q8, "int32")
#: 8-bit results are exact where the reference imitates the kernels; other CPUs round a step apart.
STEPS = 0 if platform.machine() in ("x86_64", "AMD64") else 1
#: enum xnn_status of xnnpack.h.
UNSUPPORTED_HARDWARE = 5
#: How many differences of a family are told in words.
TOLD = 3

LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 127, 128, 129, 300)
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17)
COLUMNS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 130)
INNER = (64, 1, 17, 4, 130, 33, 8, 65, 3, 15, 2, 32, 5, 128, 7, 16, 9, 66, 31)
CHANNELS = (1, 3, 4, 8, 15, 16, 17, 32, 33, 64, 65, 128, 130)
#: Images by height and width: 1, 16, 17, 33, 49 and 5 pixels.
IMAGES = ((1, 1), (4, 4), (1, 17), (3, 11), (7, 7), (5, 1))


@dataclass
class Result:
    """What was found of one family of kernels.

    Attributes
    ----------
    family : str
        Operator and datatypes, inputs before the arrow: ``conv2d 3x3 qint8 qcint8 -> qint8``.
    checks : int
        Runs that were compared.
    failed : int
        How many of them gave something else than NumPy.
    failures : list of str
        The first of those, in words.
    missing : bool
        XNNPACK has no kernels of this family for this CPU, as for fp16 where a CPU can't convert it.
    seconds : float
    """

    family: str
    checks: int = 0
    failed: int = 0
    failures: list[str] = field(default_factory=list)
    missing: bool = False
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.failed


def run(only: str | None = None) -> list[Result]:
    """Compare the kernels that this CPU selects with NumPy; a few seconds of one core.

    Parameters
    ----------
    only : str, optional
        Run only the families whose name has this in it.

    Returns
    -------
    list of Result
        One for each family, in the order of :func:`families`. Nothing is raised for what differs: ``failed`` counts it.
    """
    results = []
    for name, check in families().items():
        if only is not None and only not in name:
            continue
        patient = Patient(name)
        begin = time.perf_counter()
        try:
            check(patient)
        except XnnpackError as error:
            if error.status == UNSUPPORTED_HARDWARE and not patient.result.checks:
                patient.result.missing = True
            else:
                patient.fail("", str(error))
        except XnnfastError as error:
            # XNNPACK refused what the rules of this package call legal.
            patient.fail("", f"{type(error).__name__}: {error}")
        patient.result.seconds = time.perf_counter() - begin
        results.append(patient.result)
    return results


class Patient:
    """A family under test: makes numbers, runs graphs, compares and counts."""

    def __init__(self, name: str) -> None:
        self.result = Result(name)
        self.rng = np.random.default_rng(len(name))

    def fail(self, what: str, why: str) -> None:
        self.result.failed += 1
        if len(self.result.failures) < TOLD:
            self.result.failures.append(f"{what}: {why}" if what else why)

    def compare(
        self, what: str, got: Array, want: Array, datatype: str, tolerance: Any = 0.0, steps: int = STEPS
    ) -> None:
        """Count a run. ``tolerance`` and, of 8-bit results, ``steps`` are differences that are no fault."""
        self.result.checks += 1
        if got.shape != want.shape or got.dtype != want.dtype:
            self.fail(what, f"{got.dtype} {got.shape} for {want.dtype} {want.shape}")
            return
        if datatype == "bf16":
            off = np.abs(_ordered(got) - _ordered(want)) > 1
        elif got.dtype.kind in "iu":
            off = np.abs(got.astype(np.int64) - want.astype(np.int64)) > (steps if datatype in Q8 else 0)
        else:
            with np.errstate(invalid="ignore"):
                off = ~(np.abs(got.astype(np.float64) - want.astype(np.float64)) <= tolerance)
            off &= ~((got == want) | (np.isnan(got) & np.isnan(want)))
        if off.any():
            place = tuple(int(each) for each in np.argwhere(off)[0])
            self.fail(
                what, f"{int(off.sum())} of {off.size} differ, the first at {place}: {got[place]} for {want[place]}"
            )

    # -- numbers

    def values(self, datatype: str, shape: Sequence[int], low: float = -3.0, high: float = 3.0) -> Array:
        """Inputs: whole numbers where sums must be exact, else real ones."""
        entry = DATATYPES[datatype]
        assert entry.dtype is not None
        if datatype in Q8:
            return self.rng.integers(entry.low, entry.high + 1, shape).astype(entry.dtype)
        if datatype == "int32":
            return self.rng.integers(-50, 50, shape).astype(np.int32)
        real = self.rng.uniform(low, high, shape).astype(np.float32)
        return f32_to_bf16(real).view(entry.dtype) if datatype == "bf16" else real.astype(entry.dtype)

    def whole(self, datatype: str, shape: Sequence[int]) -> Array:
        """Inputs of sums: small whole numbers, so that fp16 and fp32 results are exact whatever the order."""
        if datatype in Q8:
            return self.values(datatype, shape)
        made: Array = self.rng.integers(-2, 3, shape).astype(DATATYPES[datatype].dtype)
        return made

    def rows(self, datatype: str, shape: Sequence[int], axes: int) -> Array:
        """Inputs that are quantized row by row: each row spans -128 to 127, which makes its scale 1."""
        flat = self.rng.integers(-128, 128, (*shape[: len(shape) - axes], int(np.prod(shape[len(shape) - axes :]))))
        flat[..., 0] = 127
        flat[..., -1] = -128
        made: Array = flat.reshape(shape).astype(DATATYPES[datatype].dtype)
        return made

    def weights(self, datatype: str, shape: Sequence[int], axis: int) -> tuple[Array, Any]:
        """A filter and its quantization."""
        if datatype in ("fp32", "fp16"):
            return self.rng.integers(-1, 2, shape).astype(DATATYPES[datatype].dtype), None
        entry = DATATYPES[datatype]
        array = self.rng.integers(entry.low, entry.high + 1, shape)
        if datatype in Q8:
            return array.astype(entry.dtype), PerTensor(1 / 64, 0 if datatype == "qint8" else 121)
        if datatype == "qbint4":
            scales = (2.0 ** self.rng.integers(-3, 1, shape[0] * shape[1] // 32)).astype(np.float32)
            return array.astype(np.int8), PerBlock(scales, 0, 32)
        scales = (2.0 ** self.rng.integers(-7, -4, shape[axis])).astype(np.float32)
        return array.astype(np.int8), PerChannel(scales, axis)

    def bias(self, datatype: str, count: int) -> Array:
        if datatype in ("qint32", "qcint32"):
            return self.rng.integers(-2000, 2000, count).astype(np.int32)
        return self.rng.integers(-4, 5, count).astype(DATATYPES[datatype].dtype)

    # -- layers

    def layer(
        self,
        types: Sequence[str],
        shape: Sequence[int],
        weights: Sequence[int],
        axis: int,
        outputs: int,
        terms: int,
        make: Callable[..., Any],
        axes: int = 1,
    ) -> Layer:
        """A graph of one layer; ``make(builder, x, filter, bias, **result)`` adds it."""
        x_type, weights_type, bias_type, out_type = types
        b = GraphBuilder()
        dynamic = x_type == "qdint8"
        source = ("fp16" if out_type == "fp16" else "fp32") if dynamic else x_type
        x: Any = b.input(shape, source, PerTensor(1 / 32, 3 if x_type == "qint8" else 131) if x_type in Q8 else None)
        if dynamic:
            x = b.convert(x, "qdint8", PerToken(axes))
        array, quantization = self.weights(weights_type, weights, axis)
        result: dict[str, Any] = {"datatype": out_type}
        if out_type in Q8:
            spread = 127 * 127 / 32 / 64 * float(np.sqrt(terms)) / 100
            result["quantization"] = PerTensor(float(np.float32(spread)), -5 if out_type == "qint8" else 120)
        bias = None if bias_type == "-" else self.bias(bias_type, outputs)
        b.output(make(b, x, b.constant(array, weights_type, quantization), bias, **result))
        return Layer(self, b, out_type, dynamic, axes, source)

    def elementwise(
        self, what: str, b: GraphBuilder, arrays: Sequence[Array], datatype: str, close: float, steps: int = STEPS
    ) -> None:
        """Compare a graph of vectors at every length, from one reference of the longest."""
        graph = b.graph()
        runtime = Runtime(graph)
        (want,) = reference.run(graph, *arrays)
        real = want.astype(np.float64) if want.dtype.kind == "f" else None
        for length in LENGTHS:
            cut = [array if len(array) == 1 else array[:length] for array in arrays]
            (got,) = runtime.run(*cut)
            tolerance = 0.0 if real is None else close * (1 + np.abs(real[:length]))
            self.compare(f"{what}, length {length}", got, want[:length], datatype, tolerance, steps)


class Layer:
    """A runtime of one layer, to be run on several inputs."""

    def __init__(
        self, patient: Patient, builder: GraphBuilder, out_type: str, dynamic: bool, axes: int, source: str
    ) -> None:
        self.patient = patient
        self.graph = builder.graph()
        self.runtime = Runtime(self.graph)
        self.out_type, self.dynamic, self.axes, self.source = out_type, dynamic, axes, source

    def input(self, shape: Sequence[int]) -> Array:
        if self.dynamic:
            return self.patient.rows(self.source, shape, self.axes)
        return self.patient.whole(self.source, shape)

    def check(self, what: str, x: Array, want: Array | None = None) -> Array:
        """Compare one run; the result that it should have."""
        if want is None:
            (want,) = reference.run(self.graph, x)
        (got,) = self.runtime.run(x)
        tolerance = _rows_close(want) if self.dynamic else 0.0
        self.patient.compare(what, got, want, self.out_type, tolerance)
        return want


def _rows_close(want: Array) -> Any:
    """Differences that dynamic quantization may make: the scale of a row is 1 but for a last place."""
    return (1e-3 if want.dtype == np.float16 else 1e-5) * np.abs(want.astype(np.float64)).max(-1, keepdims=True)


def _ordered(array: Array) -> Array:
    """bfloat16 as whole numbers in the order of the floats."""
    whole = array.view(np.uint16).astype(np.int64)
    return np.where(whole & 0x8000, 0x8000 - whole, whole)


# ---------------------------------------------------------------------------------------------------
# Families


def families() -> dict[str, Check]:
    """Name -> check of every family, in the order in which they run."""
    return dict(_families())


def _types(name: str) -> Iterator[tuple[str, ...]]:
    """The combinations of a layer's datatypes that have a bias: leaving it out takes the same kernels."""
    for types in OPS[name].datatypes:
        if "-" not in types and "bf16" not in types:
            yield types


def _named(name: str, types: Sequence[str]) -> str:
    *ins, out = types
    seen = [each for each in ins if each not in ("-", "qint32", "qcint32")]
    if len(set(seen)) == 1 and seen[0] == out:
        return f"{name} {out}"
    return f"{name} {' '.join(dict.fromkeys(seen[:2]))} -> {out}"


def _families() -> Iterator[tuple[str, Check]]:
    layers: tuple[tuple[str, str, Callable[..., None]], ...] = (
        ("fully_connected", "fully_connected", _fully_connected),
        ("conv2d", "conv2d 1x1", _pointwise),
        ("conv2d", "conv2d 3x3", _convolution),
        ("depthwise_conv2d", "depthwise_conv2d", _depthwise),
        ("conv_transpose2d", "conv_transpose2d", _transposed),
    )
    for name, title, layer in layers:
        for types in _types(name):
            yield _named(title, types), partial(layer, types=types)
    for types in OPS["batch_matrix_multiply"].datatypes:
        yield _named("batch_matrix_multiply", types), partial(_matrices, types=types)
    for kind, check in (("binary", _binary), ("unary", _unary)):
        for datatype, ops in _of_one_type(f"xnn_define_{kind}").items():
            yield f"{kind} {datatype}: {len(ops)} operators", partial(check, ops=ops, datatype=datatype)
    for datatype in PLAIN:
        yield f"clamp {datatype}", partial(_clamp, datatype=datatype)
    for source in PLAIN:
        targets = [types[1] for types in OPS["convert"].datatypes if types[0] == source and types[1] != "qdint8"]
        yield f"convert {source} -> {' '.join(targets)}", partial(_convert, source=source, targets=targets)
    others: tuple[tuple[str, Callable[..., None]], ...] = (
        ("average_pooling2d", _pooling),
        ("max_pooling2d", _pooling),
        ("argmax_pooling2d", _pooling),
        ("global_average_pooling2d", _means),
        ("static_resize_bilinear2d", _resize),
        ("softmax", _softmax),
    )
    for name, other in others:
        for types in OPS[name].datatypes:
            if len(set(types)) == 1:
                yield f"{name} {types[0]}", partial(other, name=name, datatype=types[0])


def _of_one_type(call: str) -> dict[str, list[str]]:
    """Datatype -> operators of a call that work in it."""
    found: dict[str, list[str]] = {}
    for op in OPS.values():
        if op.call == call and op.name not in ("convert", "clamp"):
            for types in op.datatypes:
                if len(set(types)) == 1:
                    found.setdefault(types[0], []).append(op.name)
    return found


def _fully_connected(patient: Patient, types: Sequence[str]) -> None:
    for outer, inner in zip(COLUMNS, INNER):
        if types[1] == "qbint4":
            inner = 32 * (1 + inner % 3)
        elif types[1] == "qcint4":
            inner += inner % 2
        layer = patient.layer(
            types, (ROWS[-1], inner), (outer, inner), 0, outer, inner,
            lambda b, x, w, bias, **result: b.fully_connected(x, w, bias, **result),
        )  # fmt: skip
        x = layer.input((ROWS[-1], inner))
        want = None
        for rows in reversed(ROWS):
            what = f"{rows} rows, {inner} in, {outer} out"
            found = layer.check(what, x[:rows], want if want is None else want[:rows])
            want = found if want is None else want


def _matrices(patient: Patient, types: Sequence[str]) -> None:
    a_type, b_type, out_type = types
    for columns, inner in zip(COLUMNS[::2], INNER[::2]):
        b = GraphBuilder()
        dynamic = a_type == "qdint8"
        source = "fp32" if dynamic else a_type
        x: Any = b.input((2, 5, inner), source)
        if dynamic:
            array, quantization = patient.weights(b_type, (2, inner, columns), 2)
            y: Any = b.constant(array, b_type, quantization)
            x = b.convert(x, "qdint8", PerToken(1))
        else:
            y = b.input((2, inner, columns), b_type)
        b.output(b.batch_matrix_multiply(x, y, datatype=out_type))
        graph = b.graph()
        runtime = Runtime(graph)
        for rows in (1, 4, 5, 8, 17):
            left = patient.rows(source, (2, rows, inner), 1) if dynamic else patient.whole(source, (2, rows, inner))
            inputs = [left] if dynamic else [left, patient.whole(b_type, (2, inner, columns))]
            (want,) = reference.run(graph, *inputs)
            (got,) = runtime.run(*inputs)
            tolerance = _rows_close(want) if dynamic else 0.0
            patient.compare(f"2x{rows}x{inner} by 2x{inner}x{columns}", got, want, out_type, tolerance)


def _images(patient: Patient, types: Sequence[str], kernel: int, pairs: Any, images: Any) -> None:
    for channels, outputs in pairs:
        layer = patient.layer(
            types, (1, *images[0], channels), (outputs, kernel, kernel, channels), 0, outputs,
            kernel * kernel * channels,
            lambda b, x, w, bias, **result: b.conv2d(x, w, bias, padding=kernel // 2, **result), axes=3,
        )  # fmt: skip
        for height, width in images:
            what = f"{height}x{width} pixels, {channels} in, {outputs} out"
            layer.check(what, layer.input((1, height, width, channels)))


def _pointwise(patient: Patient, types: Sequence[str]) -> None:
    pairs = [*list(zip(INNER, COLUMNS))[::2], (64, 64), (33, 130)]
    _images(patient, types, 1, pairs, ((1, 1), (1, 5), (2, 4), (7, 7)))


def _convolution(patient: Patient, types: Sequence[str]) -> None:
    outputs = (16, 7, 64, 33, 1, 65, 32, 17, 8, 63, 34, 15, 66)
    _images(patient, types, 3, list(zip(CHANNELS, outputs)), IMAGES)


def _depthwise(patient: Patient, types: Sequence[str]) -> None:
    for number, kernel in enumerate(((3, 3), (5, 5), (1, 1), (2, 2), (1, 3), (7, 7))):
        for channels in CHANNELS[number % 2 :: 2]:
            layer = patient.layer(
                types, (1, 6, 5, channels), (1, *kernel, channels), 3, channels, kernel[0] * kernel[1],
                lambda b, x, w, bias, kernel=kernel, **result: b.depthwise_conv2d(
                    x, w, bias, padding=max(kernel) // 2, **result
                ), axes=3,
            )  # fmt: skip
            for height, width in ((6, 5), (7, 2)):
                what = f"{kernel[0]}x{kernel[1]} over {height}x{width} pixels of {channels} channels"
                layer.check(what, layer.input((1, height, width, channels)))


def _transposed(patient: Patient, types: Sequence[str]) -> None:
    for kernel, stride in ((3, 1), (2, 2), (3, 2)):
        for channels, outputs in ((4, 1), (17, 16), (65, 33), (130, 64)):
            layer = patient.layer(
                types, (1, 3, 4, channels), (outputs, kernel, kernel, channels), 0, outputs,
                kernel * kernel * channels,
                lambda b, x, w, bias, stride=stride, **result: b.conv_transpose2d(x, w, bias, stride=stride, **result),
                axes=3,
            )  # fmt: skip
            for height, width in ((3, 4), (1, 1), (4, 4)):
                what = f"{kernel}x{kernel} stride {stride}, {height}x{width} pixels, {channels} in, {outputs} out"
                layer.check(what, layer.input((1, height, width, channels)))


# -- element by element


def _close(datatype: str) -> float:
    return {"fp32": 4e-6, "fp16": 4e-3}.get(datatype, 0.0)


def _spread(datatype: str, low: float, high: float) -> PerTensor | None:
    """Parameters that make the range of an 8-bit type low to high."""
    if datatype not in Q8:
        return None
    entry = DATATYPES[datatype]
    scale = float(np.float32((high - low) / 255))
    return PerTensor(scale, int(np.clip(round(entry.low - low / scale), entry.low, entry.high)))


def _binary(patient: Patient, ops: Sequence[str], datatype: str) -> None:
    longest = LENGTHS[-1]
    for name in ops:
        low, high = (0.5, 3.0) if name == "divide" else (-3.0, 3.0)
        for first, second in ((longest, longest), (longest, 1), (1, longest)):
            b = GraphBuilder()
            x = b.input((first,), datatype, _spread(datatype, -3.0, 3.0))
            y = b.input((second,), datatype, _spread(datatype, low, high))
            out = {"datatype": datatype, "quantization": _spread(datatype, -6.0, 6.0)}
            b.output(getattr(b, name)(x, y, **out))
            arrays = [patient.values(datatype, (first,)), patient.values(datatype, (second,), low, high)]
            patient.elementwise(f"{name} {first} {second}", b, arrays, datatype, _close(datatype))


def _unary(patient: Patient, ops: Sequence[str], datatype: str) -> None:
    for name in ops:
        positive = name in ("log", "square_root", "reciprocal_square_root")
        low, high = (0.05, 4.0) if positive else (-4.0, 4.0)
        b = GraphBuilder()
        x = b.input((LENGTHS[-1],), datatype, _spread(datatype, 0.0 if positive else low, high))
        out = {"datatype": datatype, "quantization": _spread(datatype, -3.0, 5.0)}
        b.output(getattr(b, name)(x, **out))
        patient.elementwise(name, b, [patient.values(datatype, (LENGTHS[-1],), low, high)], datatype, _close(datatype))


def _clamp(patient: Patient, datatype: str) -> None:
    b = GraphBuilder()
    quantization = _spread(datatype, -4.0, 4.0)
    x = b.input((LENGTHS[-1],), datatype, quantization)
    b.output(b.clamp(x, -1.0, 1.5, datatype=datatype, quantization=quantization))
    patient.elementwise("clamp", b, [patient.values(datatype, (LENGTHS[-1],), -4.0, 4.0)], datatype, _close(datatype))


def _convert(patient: Patient, source: str, targets: Sequence[str]) -> None:
    for target in targets:
        b = GraphBuilder()
        x = b.input((LENGTHS[-1],), source, _spread(source, -4.0, 4.0))
        b.output(b.convert(x, target, _spread(target, -3.0, 3.5)))
        array = patient.values(source, (LENGTHS[-1],), -4.0, 4.0)
        close = _close("fp16" if "fp16" in (source, target) else target)
        # Without vector kernels for it, fp16 is divided by the scale, not multiplied by its inverse.
        patient.elementwise(f"to {target}", b, [array], target, close, 1 if source == "fp16" else STEPS)


# -- the rest


def _once(patient: Patient, what: str, b: GraphBuilder, x: Array, datatype: str, close: float) -> None:
    graph = b.graph()
    results = zip(Runtime(graph).run(x), reference.run(graph, x))
    for number, (got, want) in enumerate(results):
        tolerance = close * (1 + np.abs(want.astype(np.float64)))
        patient.compare(f"{what}{', index' if number else ''}", got, want, datatype if not number else "", tolerance)


def _pooling(patient: Patient, name: str, datatype: str) -> None:
    for number, window in enumerate((2, 3, 5)):
        for channels in CHANNELS[number % 2 :: 2]:
            b = GraphBuilder()
            x = b.input((1, 10, 11, channels), datatype, _spread(datatype, -3.0, 3.0))
            made = getattr(b, name)(x, window)
            for value in made if isinstance(made, tuple) else (made,):
                b.output(value)
            array = patient.values(datatype, (1, 10, 11, channels))
            _once(patient, f"{window}x{window} of {channels} channels", b, array, datatype, _close(datatype))


def _means(patient: Patient, name: str, datatype: str) -> None:
    for number, channels in enumerate(CHANNELS):
        height, width = IMAGES[number % len(IMAGES)]
        b = GraphBuilder()
        x = b.input((1, height, width, channels), datatype, _spread(datatype, -3.0, 3.0))
        b.output(b.global_average_pooling2d(x, datatype=datatype, quantization=_spread(datatype, -2.0, 2.0)))
        array = patient.values(datatype, (1, height, width, channels))
        _once(patient, f"{height}x{width} of {channels} channels", b, array, datatype, _close(datatype))


def _resize(patient: Patient, name: str, datatype: str) -> None:
    for channels in CHANNELS:
        b = GraphBuilder()
        x = b.input((1, 4, 5, channels), datatype, _spread(datatype, -3.0, 3.0))
        b.output(b.static_resize_bilinear2d(x, (7, 6)))
        array = patient.values(datatype, (1, 4, 5, channels))
        _once(patient, f"{channels} channels", b, array, datatype, _close(datatype))


def _softmax(patient: Patient, name: str, datatype: str) -> None:
    for channels in LENGTHS:
        b = GraphBuilder()
        b.output(b.softmax(b.input((3, channels), datatype)))
        _once(patient, f"{channels} channels", b, patient.values(datatype, (3, channels)), datatype, _close(datatype))

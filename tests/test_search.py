"""A search of shapes, geometry and quantization parameters for results that differ from the reference's.

XNNFAST_SEARCH=20 searches twenty times as long, and other cases each time; without it the cases are
always the same.
"""

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from op_cases import case

import xnnfast as xf
from xnnfast import GraphBuilder, PerChannel, PerToken, Runtime, reference
from xnnfast.ops import OPS

FACTOR = float(os.environ.get("XNNFAST_SEARCH", "0"))


def search(count):
    return settings(max_examples=int(count * max(FACTOR, 1)), deadline=None, derandomize=not FACTOR, database=None,
                    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def attempt(name, types, others=(), **options):
    """Compare one case, then the same runtime on other shapes of its inputs; a refusal is an answer too."""
    try:
        made = case(name, types, **options)
    except (xf.GraphError, xf.ShapeError) as refusal:
        event(f"refused: {str(refusal)[:40]}")
        return
    event("ran")
    runtime = Runtime(made.graph)
    made.check(runtime=runtime)
    for number, shapes in enumerate(others):
        arrays = made.arrays(seed=number + 7, shapes=shapes(made))
        try:
            want = reference.run(made.graph, *arrays)
        except xf.ShapeError:
            with pytest.raises(xf.ShapeError):
                runtime.run(*arrays)
            continue
        # Against a runtime that has seen nothing else, too: state left behind shows there.
        got = runtime.run(*arrays)
        made.compare(got, want)
        for one, other in zip(got, Runtime(made.graph).run(*arrays)):
            np.testing.assert_array_equal(one, other)


def larger(shape, by=1):
    """Other shapes for ``attempt``: one input, every dimension larger."""
    return lambda made: [tuple(dim + by for dim in shape)]


def types_of(name):
    return st.sampled_from(OPS[name].datatypes)


counts = st.sampled_from([1, 2, 3, 4, 5, 8, 9, 16, 17, 33])
small = st.integers(1, 4)
sides = st.tuples(*[st.integers(0, 4)] * 4)
pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))
windows = st.tuples(st.integers(1, 5), st.integers(1, 5))


@st.composite
def images(draw, kernel, dilation=(1, 1), padding=(0, 0, 0, 0), least=1):
    """Heights and widths over which a window fits."""
    top, right, bottom, left = padding
    sizes = []
    for k, d, around in ((kernel[0], dilation[0], top + bottom), (kernel[1], dilation[1], left + right)):
        reach = (k - 1) * d + 1
        sizes.append(draw(st.integers(max(least, reach - around), max(least, reach) + 7)))
    return tuple(sizes)


@st.composite
def other_images(draw):
    """Functions from a case to other shapes of its image: more and fewer images, larger and smaller ones."""
    def changed(batch, rows, columns):
        def shapes(made):
            n, height, width, channels = made.feeds[0][0].shape
            return [(max(1, n + batch), max(1, height + rows), max(1, width + columns), channels)]
        return shapes

    return [changed(*draw(st.tuples(st.integers(-2, 3), st.integers(-3, 4), st.integers(-3, 4)))) for _ in range(3)]


@st.composite
def convolutions(draw, transposed=False):
    kernel, stride, dilation = draw(windows), draw(pairs), draw(pairs)
    options = {"kernel": kernel, "stride": stride, "dilation": dilation, "batch": draw(st.integers(1, 3))}
    padding = (0, 0, 0, 0)
    if not transposed and draw(st.booleans()):
        options["same_padding"] = True
        options["height"], options["width"] = draw(images((1, 1)))
    else:
        padding = options["padding"] = draw(sides)
        options["height"], options["width"] = draw(images((1, 1) if transposed else kernel, dilation, padding))
    if transposed:
        options["adjustment"] = tuple(draw(st.integers(0, each - 1)) for each in stride)
    if draw(st.booleans()):
        options["clamp"] = (-0.7, 0.6)
    return options | {"seed": draw(st.integers(0, 99)), "wild": draw(st.booleans())}


@search(150)
@given(types_of("conv2d"), convolutions(), counts, counts, small, other_images())
def test_conv2d(types, options, each_in, each_out, groups, others):
    attempt("conv2d", types, others, each_in=each_in, each_out=each_out, groups=groups, **options)


@search(120)
@given(types_of("depthwise_conv2d"), convolutions(), counts, small, other_images())
def test_depthwise_conv2d(types, options, channels, multiplier, others):
    attempt("depthwise_conv2d", types, others, channels=channels, multiplier=multiplier, **options)


@search(150)
@given(types_of("conv_transpose2d"), convolutions(transposed=True), counts, counts, small, other_images())
def test_conv_transpose2d(types, options, each_in, each_out, groups, others):
    attempt("conv_transpose2d", types, others, each_in=each_in, each_out=each_out, groups=groups, **options)


@st.composite
def pools(draw, strided=True, dilated=False):
    pooling = draw(windows)
    options = {"pooling": pooling, "batch": draw(st.integers(1, 3)), "channels": draw(counts)}
    dilation = (1, 1)
    if dilated and draw(st.integers(0, 2)) == 0:
        dilation = options["dilation"] = draw(pairs)
    if strided:
        options["stride"] = tuple(draw(st.integers(1, each + (0 if dilated else 1))) for each in pooling)
    if draw(st.integers(0, 3)) == 0:
        options["same_padding"] = True
        options["height"], options["width"] = draw(images((1, 1)))
    else:
        tops = [st.integers(0, each - 1) for each in pooling]
        padding = options["padding"] = draw(st.tuples(tops[0], tops[1], tops[0], tops[1]))
        options["height"], options["width"] = draw(images(pooling, dilation, padding))
    if strided and draw(st.booleans()):
        options["clamp"] = (-0.7, 0.6)
    return options | {"seed": draw(st.integers(0, 99)), "wild": draw(st.booleans())}


@search(120)
@given(types_of("average_pooling2d"), pools(), other_images())
def test_average_pooling2d(types, options, others):
    attempt("average_pooling2d", types, others, **options)


@search(150)
@given(types_of("max_pooling2d"), pools(dilated=True), other_images())
def test_max_pooling2d(types, options, others):
    attempt("max_pooling2d", types, others, **options)


@search(80)
@given(pools(strided=False), other_images())
def test_argmax_pooling2d(options, others):
    attempt("argmax_pooling2d", ("fp32",) * 3, others, **options)


@search(80)
@given(types_of("static_resize_bilinear2d"), images((1, 1)), st.tuples(st.integers(1, 9), st.integers(1, 9)), counts,
       st.sampled_from([{}, {"align_corners": True}, {"legacy_mode": True}]), st.integers(0, 99), other_images())
def test_resize(types, size, new_size, channels, flags, seed, others):
    attempt("static_resize_bilinear2d", types, others, height=size[0], width=size[1], size=new_size, channels=channels,
            seed=seed, wild=True, **flags)


@search(60)
@given(types_of("global_average_pooling2d"), st.lists(counts, min_size=3, max_size=5), st.booleans(),
       st.integers(0, 99))
def test_global_average_pooling2d(types, shape, keep_dims, seed):
    attempt("global_average_pooling2d", types, [larger(shape)], shape=shape, keep_dims=keep_dims, seed=seed, wild=True)


# ---- moving elements


shapes = st.lists(st.integers(1, 5), min_size=1, max_size=6).map(tuple)


@search(100)
@given(st.data(), types_of("static_transpose"), shapes)
def test_transpose(data, types, shape):
    perm = data.draw(st.permutations(range(len(shape))))
    attempt("static_transpose", types, [larger(shape, 2)], shape=shape, perm=perm, wild=True)


@search(100)
@given(st.data(), types_of("static_slice"), shapes)
def test_slice(data, types, shape):
    offsets = [data.draw(st.integers(0, dim - 1)) for dim in shape]
    sizes = [data.draw(st.one_of(st.none(), st.integers(1, dim - offset))) for dim, offset in zip(shape, offsets)]
    attempt("static_slice", types, shape=shape, offsets=offsets, sizes=sizes, wild=True)


@search(100)
@given(st.data(), types_of("static_constant_pad"), shapes, st.floats(-300, 300, width=32))
def test_pad(data, types, shape, value):
    before, after = (data.draw(st.lists(st.integers(0, 3), min_size=len(shape), max_size=len(shape))) for _ in range(2))
    if types[0] == "fp16":
        value = float(np.float16(value))
    attempt("static_constant_pad", types, [larger(shape), lambda made: [(1,) * len(shape)]], shape=shape, before=before,
            after=after, value=value, wild=True)


@search(100)
@given(st.data(), types_of("static_reshape"), shapes)
def test_reshape(data, types, shape):
    count = int(np.prod(shape))
    new = []
    while count > 1 and len(new) < 5:
        new.append(data.draw(st.sampled_from([each for each in range(1, count + 1) if count % each == 0])))
        count //= new[-1]
    new.append(count)
    if data.draw(st.booleans()):
        new[data.draw(st.integers(0, len(new) - 1))] = -1
    attempt("static_reshape", types, shape=shape, new_shape=new)


@search(100)
@given(st.data(), st.integers(2, 5), shapes)
def test_concatenate(data, count, shape):
    name = f"concatenate{count}"
    axis = data.draw(st.integers(0, len(shape) - 1))
    sizes = [data.draw(st.integers(1, 9)) for _ in range(5)]
    constant = data.draw(st.sets(st.integers(0, count - 1), max_size=2))

    def longer(made):
        grown = data.draw(st.sets(st.integers(0, len(shape) - 1)))
        return [tuple(dim + (place in grown) for place, dim in enumerate(value.shape)) for value, *_ in made.feeds]

    attempt(name, data.draw(types_of(name)), [] if constant else [longer] * 2, shape=shape, axis=axis, sizes=sizes,
            constant=constant)


# ---- products


@st.composite
def broadcast_pairs(draw, most=4):
    """Two shapes that broadcast, of the same or different rank."""
    full = draw(st.lists(st.integers(1, 5), max_size=most))
    made = []
    for _ in range(2):
        kept = [1 if draw(st.integers(0, 3)) == 0 else dim for dim in full]
        made.append(tuple(kept[draw(st.integers(0, len(full))):] if draw(st.booleans()) else kept))
    return made


@search(120)
@given(types_of("batch_matrix_multiply"), broadcast_pairs(), counts, counts, counts, st.booleans(), st.booleans(),
       st.integers(0, 99))
def test_batch_matrix_multiply(types, batches, rows, inner, columns, transpose, constant, seed):
    first, second = batches
    if types[0] == "fp16" and inner > 9:
        inner = 9
    attempt("batch_matrix_multiply", types, first=first, second=second, rows=rows, inner=inner, columns=columns,
            transpose=transpose, constant=constant, seed=seed)


@search(150)
@given(types_of("fully_connected"), st.lists(st.integers(1, 7), max_size=3), counts, counts, st.booleans(),
       st.booleans(), st.integers(0, 99))
def test_fully_connected(types, lead, inner, outer, transpose, wild, seed):
    if types[1] in ("qcint4", "qbint4"):
        inner, transpose = (2 * inner if types[1] == "qcint4" else 32 * inner), False
    others = [lambda made: [(*(dim + 2 for dim in lead), inner)], lambda made: [(*(1 for _ in lead), inner)]]
    attempt("fully_connected", types, others, lead=lead, inner=inner, outer=outer, transpose=transpose, wild=wild,
            seed=seed)


# ---- element by element


@search(200)
@given(st.data(), st.sampled_from([name for name, op in OPS.items() if op.call == "xnn_define_binary"]),
       broadcast_pairs(most=6), st.booleans(), st.booleans(), st.integers(0, 99))
def test_binary(data, name, pair, constant, wild, seed):
    types = data.draw(types_of(name))
    others = []
    if not constant:
        def switched(made):
            # What was stretched is whole, and the other way round.
            ranks = [len(value.shape) for value, *_ in made.feeds]
            full = [3, 4, 2, 3, 2, 4]
            return [tuple(1 if data.draw(st.booleans()) else dim for dim in full[6 - rank:]) for rank in ranks]

        others = [switched] * 3
    attempt(name, types, others, first=pair[0], second=pair[1], constant=constant, wild=wild, seed=seed)


@search(200)
@given(st.data(), st.sampled_from([name for name, op in OPS.items() if op.call == "xnn_define_unary"]),
       st.lists(counts, min_size=1, max_size=3), st.integers(0, 999))
def test_unary(data, name, shape, seed):
    attempt(name, data.draw(types_of(name)), [larger(shape)], shape=tuple(shape), wild=True, seed=seed)


@search(150)
@given(types_of("convert"), st.lists(counts, min_size=1, max_size=3), st.integers(0, 999))
def test_convert(types, shape, seed):
    attempt("convert", types, [lambda made: [(shape[0] + 2, *shape[1:])]], shape=tuple(shape), wild=True, seed=seed)


# ---- several nodes: memory is planned once and used again for other shapes


@st.composite
def programs(draw):
    """Steps of a graph of element-wise nodes over three inputs: (operator, operands counted from the end)."""
    names = st.sampled_from(["add", "subtract", "multiply", "minimum", "maximum", "negate", "abs", "square", "clamp",
                             "sigmoid"])
    return [(draw(names), draw(st.integers(1, 3)), draw(st.integers(1, 4))) for _ in range(draw(st.integers(2, 7)))]


@search(200)
@given(programs(), st.lists(st.tuples(*[st.sampled_from([(4, 6), (1, 6), (4, 1), (1, 1), (7, 6), (2, 6)])] * 3),
                            min_size=2, max_size=5), st.sampled_from(["fp32", "fp16"]))
def test_graphs_keep_no_state_over_shapes(program, all_shapes, datatype):
    b = GraphBuilder()
    values = [b.input(shape, datatype) for shape in all_shapes[0]]
    inputs, unread = values[:], {}
    try:
        for name, one, two in program:
            operands = [values[-one], values[-min(two, len(values))]][:len(OPS[name].inputs)]
            for value in operands:
                unread.pop(value.id, None)
            values.append(b.clamp(operands[0], -0.5, 2) if name == "clamp" else getattr(b, name)(*operands))
            unread[values[-1].id] = values[-1]
    except xf.ShapeError:
        return
    for value in unread.values():
        b.output(value)
    graph = b.graph()
    runtime = Runtime(graph)
    rng = np.random.default_rng(0)
    for shapes in (*all_shapes, all_shapes[0]):
        arrays = [rng.uniform(-2, 2, shape).astype(inputs[0].dtype) for shape in shapes]
        try:
            want = reference.run(graph, *arrays)
        except xf.ShapeError:
            with pytest.raises(xf.ShapeError):
                runtime.run(*arrays)
            continue
        fresh = Runtime(graph).run(*arrays)
        for one, two, three in zip(runtime.run(*arrays), fresh, want):
            np.testing.assert_array_equal(one, two)
            tolerance = 2e-2 if datatype == "fp16" else 1e-4
            np.testing.assert_allclose(one.astype(float), three.astype(float), rtol=tolerance, atol=tolerance)


IMAGE_STEPS = {
    "conv": lambda b, x, n: b.conv2d(x, n.weights(5, 3, 3, x.shape[3]), n.weights(5), padding=1, clamp=(-2, 2)),
    "strided": lambda b, x, n: b.conv2d(x, n.weights(4, 2, 2, x.shape[3]), stride=2, padding=1),
    "pointwise": lambda b, x, n: b.conv2d(x, n.weights(6, 1, 1, x.shape[3])),
    "depthwise": lambda b, x, n: b.depthwise_conv2d(x, n.weights(1, 3, 3, x.shape[3]), same_padding=True),
    "transposed": lambda b, x, n: b.conv_transpose2d(x, n.weights(3, 2, 2, x.shape[3]), stride=2),
    "dynamic": lambda b, x, n: b.conv2d(b.convert(x, "qdint8", PerToken(3)), b.constant(
        n.rng.integers(-127, 128, (4, 3, 3, x.shape[3])).astype(np.int8), "qcint8", PerChannel(np.full(4, .01), 0)),
        padding=1),
    "max": lambda b, x, n: b.max_pooling2d(x, 2, stride=1),
    "average": lambda b, x, n: b.average_pooling2d(x, 2, stride=1),
    "global": lambda b, x, n: b.multiply(x, b.sigmoid(b.global_average_pooling2d(x))),
    "resize": lambda b, x, n: b.static_resize_bilinear2d(x, (5, 4)),
    "pad": lambda b, x, n: b.static_constant_pad(x, (0, 1, 0, 0), (0, 0, 1, 0), .5),
    "slice": lambda b, x, n: b.static_slice(x, (0, 1, 0, 0), (None, None, None, None)),
    "clamp": lambda b, x, n: b.clamp(x, -1, 1),
    "negate": lambda b, x, n: b.negate(x),
    "leaky": lambda b, x, n: b.leaky_relu(x, .25),
    "bias": lambda b, x, n: b.add(x, n.weights(x.shape[3])),
    "concat": lambda b, x, n: b.concatenate2(x, b.square(x), 3),
    "rows": lambda b, x, n: b.static_reshape(b.softmax(b.static_reshape(
        x, (x.shape[0], x.shape[1] * x.shape[2], x.shape[3]))), x.shape),
    "flat": lambda b, x, n: b.static_reshape(b.fully_connected(b.static_reshape(
        x, (x.shape[0] * x.shape[1] * x.shape[2], x.shape[3])), n.weights(7, x.shape[3])), (*x.shape[:3], 7)),
    "turned": lambda b, x, n: b.static_transpose(b.abs(b.static_transpose(x, (0, 3, 1, 2))), (0, 2, 3, 1)),
    "products": lambda b, x, n: b.batch_matrix_multiply(x, n.weights(x.shape[3], 6)),
}


class Numbers:
    """Weights that are the same in every graph of one program."""

    def __init__(self):
        self.rng = np.random.default_rng(5)

    def weights(self, *shape):
        return self.rng.uniform(-.5, .5, shape).astype(np.float32)


def image_graph(steps, batch):
    b, numbers = GraphBuilder(), Numbers()
    values = [b.input((batch, 7, 6, 3))]
    for name, back in steps:
        x = values[-min(back, len(values))]
        values.append(IMAGE_STEPS[name](b, x, numbers))
        same = [each for each in values[:-1] if each.shape == values[-1].shape]
        if same and back == 2:
            values.append(b.add(values[-1], same[-1], clamp=(-4, 4)))
    consumed = {value for node in b.parts().nodes for value in node.inputs}
    for value in values[1:]:
        if value.id not in consumed:
            b.output(value)
    return b.graph()


@search(120)
@given(st.lists(st.tuples(st.sampled_from(sorted(IMAGE_STEPS)), st.integers(1, 3)), min_size=1, max_size=7),
       st.lists(st.integers(1, 6), min_size=2, max_size=4), st.integers(2, 4))
def test_graphs_follow_the_batch(steps, batches, declared):
    try:
        runtime = Runtime(image_graph(steps, declared))
    except xf.ShapeError:
        # A window that no longer fits.
        return
    for batch in (declared, *batches):
        x = np.random.default_rng(batch).uniform(-1, 1, (batch, 7, 6, 3)).astype(np.float32)
        fresh = Runtime(image_graph(steps, batch))
        dynamic = any(name == "dynamic" for name, _ in steps)
        for got, alone, want in zip(runtime.run(x), fresh.run(x), reference.run(fresh.graph, x)):
            np.testing.assert_array_equal(got, alone)
            tolerance = .05 if dynamic else 1e-4
            np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())

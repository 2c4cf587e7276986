"""Faults that others had, class K: order of nodes, pass-through values, producers, aliases."""

import files
import numpy as np
import pytest
from small import built, f32, ramp, ran, refused, stored

import xnnfast as xf
from xnnfast import GraphBuilder, Runtime, writer
from xnnfast._graph import Graph, Node, Value
from xnnfast.lower import lower
from xnnfast.ops import OPS

INF = np.inf


def values(*ids, inputs=(), outputs=(), shape=(3,)):
    """Values of those ids; the external ones are numbered in the order given."""
    external = [*inputs, *outputs]
    return [Value(id, "fp32", shape, is_input=id in inputs, is_output=id in outputs,
                  external_id=external.index(id) if id in external else None) for id in ids]


def unary(name, source, target, index=0):
    return Node(OPS[name], (source,), (target,), index=index)


def binary(name, one, two, target, index=0):
    return Node(OPS[name], (one, two), (target,), index=index)


def file(made, nodes):
    return writer.to_bytes(writer.Parts(made, nodes, [value for value in made if value.is_input],
                                        [value for value in made if value.is_output]))


def test_K1_a_value_that_is_input_and_output_is_copied():
    b = GraphBuilder()
    x = b.input((3,))
    b.output(x)
    b.output(b.negate(x))
    graph = xf.load(b.finish())
    array = f32(1, 2, 3)
    same, negative = Runtime(graph).run(array)
    np.testing.assert_array_equal(same, array)
    np.testing.assert_array_equal(negative, -array)
    assert not np.shares_memory(same, array)


def test_K1_without_any_node():
    b = GraphBuilder()
    b.output(b.input((2, 3)))
    array = ramp(2, 3)
    (same,) = Runtime(xf.load(b.finish())).run(array)
    np.testing.assert_array_equal(same, array)
    assert not np.shares_memory(same, array)


def test_K1_a_value_both_consumed_and_exported():
    def build(b):
        x = b.input((3,))
        doubled = b.add(x, x)
        return doubled, b.clamp(doubled, 0, 5)

    doubled, clamped = ran(build, f32(-1, 2, 3))
    assert doubled.tolist() == [-2, 4, 6]
    assert clamped.tolist() == [0, 4, 5]


def test_K3_an_output_that_nothing_writes():
    good = file(values(0, 1, inputs=(0,), outputs=(1,)), [unary("negate", 0, 1)])
    assert Runtime(xf.load(good)).run(f32(1, 2, 3))[0].tolist() == [-1, -2, -3]
    refused(file(values(0, 1, 2, inputs=(0,), outputs=(1, 2)), [unary("negate", 0, 1)]),
            "value 2 .*external output that no node writes", xf.GraphError)


def test_K3_two_nodes_that_write_one_value():
    nodes = [unary("negate", 0, 1), unary("abs", 0, 1, 1)]
    refused(file(values(0, 1, inputs=(0,), outputs=(1,)), nodes),
            r"node 1 \(abs\): output_id is value 1, which node 0 \(negate\) writes too", xf.GraphError)


def test_K3_duplicate_external_ids():
    made = values(0, 1, 2, inputs=(0, 1), outputs=(2,))
    node = binary("add", 0, 1, 2)
    xf.load(file(made, [node]))
    made[1] = made[1].replace(external_id=0)
    refused(file(made, [node]), "values 0 and 1 both have external id 0", xf.GraphError)


def test_K3_external_ids_beyond_their_number():
    xf.load(files.bare())
    refused(files.bare(files.tree(num_externs=1)), "value 2 has external id 1, need one below num_externs = 1")
    refused(files.bare(files.tree(num_externs=3)), "need num_externs equal to the number of external .* found 3")


@pytest.mark.parametrize("flags", [1, 2])
def test_K3_a_constant_that_is_external(flags):
    table = files.plain(1, constant=1, external=1, flags=flags)
    tables = files.values(files.plain(0, external=0, flags=1), table, files.plain(2, external=2, flags=2))
    refused(files.bare(files.tree(xvalues=tables, num_externs=3)), "value 1 .*a constant can't be an external")


def test_K3_an_unused_input_is_no_error():
    graph = xf.load(file(values(0, 1, 2, inputs=(0, 1), outputs=(2,)), [unary("negate", 0, 2)]))
    assert "input value 1 is not used" in graph.notes
    assert Runtime(graph).run(f32(1, 2, 3), f32(7, 7, 7))[0].tolist() == [-1, -2, -3]


def test_K_nodes_are_sorted():
    # The engine runs them as they come, from unset memory.
    nodes = [unary("negate", 1, 2), unary("abs", 0, 1, 1)]
    graph = xf.load(file(values(0, 1, 2, inputs=(0,), outputs=(2,)), nodes))
    assert [node.index for node in graph.nodes] == [1, 0]
    assert Runtime(graph).run(f32(-1, 2, 0))[0].tolist() == [-1, -2, 0]


@pytest.mark.parametrize("nodes", [
    [unary("negate", 2, 1), unary("abs", 1, 2, 1)],
    [unary("negate", 0, 1), binary("add", 1, 2, 2, 1)],
], ids=["two", "one"])
def test_K_cycles_are_refused(nodes):
    refused(file(values(0, 1, 2, inputs=(0,), outputs=(2,)), nodes), "cycle", xf.GraphError)


def test_K_a_chain_of_dead_nodes_is_left_out():
    # The engine aborts the process.
    nodes = [unary("negate", 0, 1), unary("abs", 0, 2, 1), unary("exp", 2, 3, 2), unary("tanh", 3, 4, 3)]
    graph = xf.load(file(values(0, 1, 2, 3, 4, inputs=(0,), outputs=(1,)), nodes))
    assert [node.op.name for node in lower(graph).nodes] == ["negate"]
    assert sum("leads to no output" in note for note in graph.notes) == 3
    assert Runtime(graph).run(f32(1, 2, 3))[0].tolist() == [-1, -2, -3]


@pytest.mark.parametrize("node, match", [
    (unary("negate", 9, 1), "input_id is 9, and no value has that id"),
    (unary("negate", 0, 9), "output_id is 9, and no value has that id"),
    (unary("negate", 0, 0), "value 0, an external input, which no node may write"),
    (unary("negate", 2, 1), "value 2, which is neither constant nor external input and written by no node"),
])
def test_K_ids_are_checked(node, match):
    refused(file(values(0, 1, 2, inputs=(0,), outputs=(1,)), [node]), match, xf.GraphError)


def test_K_two_outputs_of_one_value_are_refused():
    # The builder's own graphs can't have them; a file names each value once.
    made = values(0, 1, inputs=(0,), outputs=(1,))
    with pytest.raises(xf.GraphError, match="listed twice"):
        Graph(made, [unary("negate", 0, 1)], [made[0]], [made[1], made[1]])


def test_K_an_operand_used_twice():
    got = ran(lambda b: (lambda x: b.multiply(x, x))(b.input((3,))), f32(1, 2, 3))
    assert got.tolist() == [1, 4, 9]


@pytest.mark.parametrize("inner, outer", [((0.5, 6), (-INF, INF)), ((0, 6), (-1, 2)), ((-INF, 0), (-3, INF))])
def test_K_a_clamp_does_not_reach_the_padding(inner, outer):
    # The engine's own fusion writes limits over the producer's padding; the shapes show it.
    def build(b):
        conv = b.conv2d(b.input((1, 5, 5, 2)), ramp(2, 3, 3, 2) / 36, padding=1)
        return b.clamp(b.clamp(conv, *inner), *outer)

    x = ramp(1, 5, 5, 2) / 25 - 1
    (want,) = xf.reference.run(built(build).graph(), x)
    np.testing.assert_allclose(ran(build, x), want, rtol=1e-5, atol=1e-6)


def test_K_flags_of_values_are_checked():
    tables = files.values(files.plain(0, external=0, flags=4), files.plain(1, constant=1),
                          files.plain(2, external=1, flags=2))
    refused(files.bare(files.tree(xvalues=tables)), "value 0 has flags 0x4")


def test_K_a_node_without_output():
    refused(stored(lambda b: b.negate(b.input((3,))), outputs=(0xFFFFFFFF,)), r"node 0 \(negate\): output_id is absent")

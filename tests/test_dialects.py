"""Dialects: which one a section is in, what is demanded of the seed, and what numbers mean in each."""

from __future__ import annotations

import files
import pytest

from xnnfast import dialects
from xnnfast._payload import Payload
from xnnfast.containers import sections
from xnnfast.errors import ArgumentError, FormatError
from xnnfast.load import load
from xnnfast.writer import encode


def section(data):
    (found,) = sections(Payload.open(data))
    return found


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (files.seed, "seed"),
        (files.bare, "xn00"),
        (lambda: files.bare(identifier=b"XN01"), "xn01"),
        (lambda: files.xh00(files.bare()), "xn00"),
        (files.inline, "xn01"),
    ],
)
def test_identifier_decides(make, name):
    assert dialects.of(section(make())).name == name
    assert dialects.of(section(make()), name).name == name


@pytest.mark.parametrize("identifier", [b"XN02", b"XN10", b"TFL3", b"ABCD"])
def test_unknown_identifier_is_refused(identifier):
    # With one addition in it the bytes would pass for a seed graph.
    with pytest.raises(FormatError, match=f"need identifier XN00 or XN01, or none, found {identifier.decode()}"):
        load(files.bare(identifier=identifier))


def test_no_identifier_and_no_seed():
    graph = files.tree(xnodes=[files.node("XNNAbs", input_id=0, output_id=2, flags=0)])
    with pytest.raises(
        FormatError, match=r"only the seed dialect is left, and that does not fit: .*has no member 30, known are 1 to 1"
    ) as caught:
        load(encode(graph))
    assert caught.value.path == "XNNGraph.xnodes[0].xnode"
    # Said outright, it is read as what it is.
    assert load(encode(graph), dialect="xn00").nodes[0].op.name == "abs"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"constant_data": []}, "slot 8 of XNNGraph"),
        ({"xnodes": [files.add(0, 1, 2, clamp={"output_max": 6.0})]}, "slot 3 of XNode"),
        (
            {
                "xvalues": files.values(
                    files.plain(0, external=0, flags=1, dq_datatype=3),
                    files.plain(1, constant=1),
                    files.plain(2, external=1, flags=2),
                )
            },
            "slot 7 of XNNTensorValue",
        ),
        ({"xvalues": files.values({"tensor_value": files.plain(0)})}, "has no member 2, known are 1 to 1"),
    ],
)
def test_seed_has_nothing_of_later_dialects(changes, match):
    data = encode(files.tree(**{"version": files.SEED_VERSION, **changes}))
    for dialect in (None, "seed"):
        with pytest.raises(FormatError, match=match):
            load(data, dialect=dialect)


def test_seed_and_first_xnn_graph_are_the_same_bytes():
    assert files.seed() == encode(files.tree(version=files.SEED_VERSION))


def test_forced_dialect_is_still_verified():
    with pytest.raises(FormatError):
        load(files.seed()[:100], dialect="seed")
    with pytest.raises(ArgumentError, match="need a dialect of seed, xn00, xn01, found 'xn02'"):
        load(files.seed(), dialect="xn02")
    with pytest.raises(FormatError, match="need no XH00 header around the seed dialect"):
        load(files.inline(), dialect="seed")


def test_forced_dialect_overrules_the_identifier():
    assert load(files.bare(files.tree(version=files.SEED_VERSION)), dialect="seed").dialect == "seed"
    assert load(files.bare(), dialect="xn01").dialect == "xn01"


@pytest.mark.parametrize("version", ["0", "", "not hexadecimal", None])
def test_version_of_a_seed_is_a_hint(version):
    graph = load(files.seed(files.seed_tree(version=version)))
    (note,) = graph.notes
    assert "seed files have 40 hexadecimal digits" in note
    assert load(files.seed()).notes == ()
    assert load(files.bare(files.tree(version=version))).notes == ()


# ---- datatypes


def typed(number, dialect):
    """The addition with all values of one datatype number."""
    constant = bytes(64)
    changes = {
        "xvalues": files.values(
            files.plain(0, external=0, flags=1, datatype=number),
            files.plain(1, constant=1, datatype=number),
            files.plain(2, external=1, flags=2, datatype=number),
        ),
        "constant_buffer": [{}, {"storage": constant}],
        "mem_buffer_sizes": [0, len(constant)],
    }
    return files.seed(files.seed_tree(**changes)) if dialect == "seed" else files.bare(files.tree(**changes))


ALL = {0: (0.5, 1), 1: (0.5, 1), 2: (0.5, 1)}


@pytest.mark.parametrize(("number", "name"), [(1, "fp32"), (2, "fp16")])
@pytest.mark.parametrize("dialect", ["seed", "xn00"])
def test_floats_have_one_number(number, name, dialect):
    assert {value.datatype for value in load(typed(number, dialect)).values} == {name}


@pytest.mark.parametrize("dialect", ["seed", "xn00"])
def test_plain_qint8_needs_the_callers_parameters(dialect):
    data = typed(3, dialect)
    with pytest.raises(
        ValueError,
        match=r"value 0 is qint8 and the file stores no scale.*: give them as quantization=\{0: \(scale, zero_",
    ):
        load(data)
    with pytest.raises(ValueError, match="value 2 is qint8"):
        load(data, quantization={0: (0.5, 1), 1: (0.5, 1)})
    graph = load(data, quantization=ALL)
    assert [value.quantization for value in graph.values] == [(0.5, 1)] * 3


def test_number_four_is_read_by_its_own_dialect():
    assert {value.datatype for value in load(typed(4, "xn00"), quantization=ALL).values} == {"quint8"}
    with pytest.raises(ValueError, match="value 0 is qint32, and XNNPACK has no addition of that type"):
        load(typed(4, "seed"), quantization=ALL)


@pytest.mark.parametrize("number", [0, 5, 6, 12, -1, 99])
def test_unknown_numbers_of_the_seed(number):
    with pytest.raises(
        FormatError, match=f"need a datatype that the seed dialect has, found number {number}"
    ) as caught:
        load(typed(number, "seed"))
    assert caught.value.path == "XNNGraph.xvalues[0].datatype"


@pytest.mark.parametrize("number", [0, 15, 99, -1, -32768, 32767])
def test_unknown_numbers(number):
    with pytest.raises(FormatError, match=f"need a datatype that the xn00 dialect has, found number {number}"):
        load(typed(number, "xn00"))


@pytest.mark.parametrize(("number", "name"), [(11, "qpint8"), (13, "pfp32")])
def test_private_packings_are_refused(number, name):
    with pytest.raises(FormatError, match=f"datatype {name} .number {number}. is XNNPACK's own"):
        load(typed(number, "xn00"))


@pytest.mark.parametrize(("number", "name"), [(12, "int32"), (14, "bf16")])
def test_numbers_that_xnnpack_counts_otherwise(number, name):
    assert {value.datatype for value in load(typed(number, "xn00")).values} == {name}


@pytest.mark.parametrize(
    ("number", "name"), [(6, "qcint8"), (7, "qcint32"), (8, "qcint4"), (9, "qdint8"), (10, "qbint4")]
)
def test_plain_values_can_not_have_many_scales(number, name):
    with pytest.raises(ValueError, match=f"value 0 of {name} needs quantization parameters, a plain value has none"):
        load(typed(number, "xn00"), quantization=ALL)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({5: (1.0, 0)}, "value 5, which does not exist"),
        ({0: (1.0, 0)}, "value 0, which stores its own or needs none"),
        ({0: 1.0}, "need quantization="),
        ({0: (1.0, "x")}, "need quantization="),
        ({"a": (1.0, 0)}, "need quantization="),
    ],
)
def test_parameters_for_nothing_are_refused(given, match):
    with pytest.raises(ArgumentError, match=match):
        load(files.bare(), quantization=given)


@pytest.mark.parametrize(
    "pair", [(0.0, 0), (-1.0, 0), (float("nan"), 0), (float("inf"), 0), (1e-40, 0), (1.0, 128), (1.0, -129)]
)
def test_parameters_of_the_caller_are_validated(pair):
    with pytest.raises(ValueError, match=r"value 0.*need a"):
        load(typed(3, "xn00"), quantization={**ALL, 0: pair})


@files.needs_shared
def test_exported_seed_files():
    paths = files.shared_files("seed.fb")
    assert paths
    for path in paths:
        graph = load(path)
        assert graph.dialect == "seed" and {node.op.name for node in graph.nodes} == {"add"}

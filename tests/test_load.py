"""load and load_all: zero copy by address, copies and why, memory that is not touched, and routing of programs."""

from __future__ import annotations

import gc
import json
import os
import pathlib
import subprocess
import sys

import files
import numpy as np
import pytest

from xnnfast.containers import ProgramFile
from xnnfast.errors import (
    AlignmentError,
    ArgumentError,
    FormatError,
    GraphError,
    LimitError,
    UnsupportedError,
    XnnfastError,
)
from xnnfast.load import load, load_all

PAGE = os.sysconf("SC_PAGESIZE")


def saved(tmp_path, data, name="model.xnn"):
    path = tmp_path / name
    path.write_bytes(data)
    return path


# ---- zero copy


@pytest.mark.parametrize("make", [files.bare, files.seed, files.inline, files.program])
def test_constants_of_a_file_lie_in_its_map(tmp_path, make):
    graph = load(saved(tmp_path, make() + bytes(16)))
    start, nbytes = graph.owner.address, graph.owner.nbytes
    assert graph.owner.mapped
    for constant in graph.constants:
        address = np.frombuffer(constant.data, np.uint8).ctypes.data
        assert start <= address and address + constant.nbytes <= start + nbytes
        assert address == start + constant.offset == constant.address
        assert address % 16 == 0
        assert constant.in_place and constant.reason is None and constant.data.readonly
    assert graph.values[1].array().ctypes.data == graph.constants[0].address
    assert graph.zero_copy == (1, 1)
    assert str(tmp_path) in graph.source


def test_constants_of_a_buffer_lie_in_it():
    data = files.bare() + bytes(16)
    graph = load(data)
    start = np.frombuffer(data, np.uint8).ctypes.data
    assert graph.constants[0].address == start + graph.constants[0].offset


def test_array_keeps_the_map(tmp_path):
    path = saved(tmp_path, files.bare() + bytes(16))
    array = load(path).values[1].array()
    gc.collect()
    assert str(path) in pathlib.Path("/proc/self/maps").read_text()
    assert array.tolist() == [files.ONES.tolist()]
    assert not array.flags.writeable
    del array
    gc.collect()
    assert str(path) not in pathlib.Path("/proc/self/maps").read_text()


@files.needs_shared
@pytest.mark.parametrize("name", ["mobilenet_v2_fp32_b1", "mobilenet_v2_qs8_b1"])
def test_models_are_read_in_place(name):
    path = files.SHARED / "models" / name / "model.pte"
    if not path.exists():
        pytest.skip(f"no {path}")
    graph = load(path, copy=False)
    assert graph.zero_copy == (len(graph.constants),) * 2 and len(graph.constants) > 100
    low, high = graph.owner.address, graph.owner.address + graph.owner.nbytes
    assert all(
        low <= constant.address and constant.address + constant.nbytes + 16 <= high + PAGE
        for constant in graph.constants
    )


def memory_after(script: str, *args: object) -> tuple[int, int]:
    """(peak resident, mapped) kB of a fresh process that runs the script, less those after its imports.

    The peak is that of anonymous and file pages together: what was touched, whoever owns it.
    """
    program = "\n".join(
        (
            "import sys",
            "from xnnfast.errors import XnnfastError",
            "from xnnfast.load import load",
            "def status(name):",
            "    return next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith(name))",
            "before = status('VmHWM'), status('VmSize')",
            script,
            "print(status('VmHWM') - before[0], status('VmSize') - before[1])",
        )
    )
    result = subprocess.run(
        [sys.executable, "-c", program, *map(str, args)], capture_output=True, text=True, check=True, timeout=120
    )
    resident, mapped = result.stdout.split()
    return int(resident), int(mapped)


def sparse_program(path, size):
    """A program whose weights, of that many bytes, are a hole in the file."""
    rows = size // 64
    graph = files.headed_tree(
        {"offset": 2**64 - 1, "size": size, "named_key": "weights"},
        xvalues=files.values(
            files.plain(0, external=0, flags=1, dims=(1, 16)),
            files.plain(1, constant=1, dims=(rows, 16)),
            files.plain(2, external=1, flags=2, dims=(1, rows)),
        ),
        xnodes=[files.node("XNNFullyConnected", input1_id=0, filter_id=1, bias_id=files.NONE, output_id=2)],
    )
    payload = files.xh00(files.encode(graph, identifier=b"XN01"))
    values = [files.tensor((1, 16)), files.tensor((1, rows))]

    def build(places):
        return files.encode(
            {
                "version": 0,
                "execution_plan": [files.plan(values=values)],
                "segments": [*places, {"offset": 4096, "size": size}],
                "named_data": [{"key": "weights", "segment_index": 2}],
            },
            schema_key="program",
            identifier=b"ET12",
        )

    data = bytearray(files.with_segments([b"", payload], build, b"eh00", data=4096 + size + 128))
    base = int.from_bytes(data[24:32], "little")
    with open(path, "wb") as file:
        file.write(data)
        file.truncate(base + 4096 + size + 128)


def test_half_a_gigabyte_is_not_touched(tmp_path):
    path = tmp_path / "sparse.pte"
    sparse_program(path, 500 << 20)
    resident, mapped = memory_after("graph = load(sys.argv[1]); assert graph.zero_copy == (1, 1)", path)
    assert mapped > 490 << 10
    assert resident < 2000
    resident, _ = memory_after("graph = load(sys.argv[1], copy=True); assert graph.zero_copy == (0, 1)", path)
    assert resident > 490 << 10


def test_weights_beyond_four_gibibytes(tmp_path):
    path = tmp_path / "sparse.pte"
    sparse_program(path, 5 << 30)
    graph = load(path)
    assert graph.constants[0].nbytes == 5 << 30
    assert graph.zero_copy == (1, 1)
    resident, _ = memory_after("graph = load(sys.argv[1])", path)
    assert resident < 2000


def test_loading_leaks_nothing(tmp_path):
    path = saved(tmp_path, files.program() + bytes(16))

    def maps():
        return pathlib.Path("/proc/self/maps").read_text().count(str(path))

    for _ in range(50):
        load(path)
    gc.collect()
    assert maps() == 0
    assert len(os.listdir("/proc/self/fd")) < 100


# ---- copies and why


def reason(source, **options):
    (constant,) = load(source, **options).constants
    assert constant.in_place is (constant.reason is None)
    if not constant.in_place:
        assert constant.address % 64 == 0
    return constant.reason


def test_copy_true_and_false():
    data = files.bare() + bytes(16)
    assert reason(data) is None
    assert reason(data, copy=False) is None
    assert reason(data, copy=True) == "copy=True"
    for wrong in ("yes", 2, []):
        with pytest.raises(ArgumentError, match="need copy None, True or False"):
            load(data, copy=wrong)


@pytest.mark.parametrize(
    "make",
    [
        bytearray,
        lambda data: memoryview(bytearray(data)).toreadonly(),
        lambda data: np.frombuffer(data, np.uint8).copy(),
    ],
)
def test_constants_of_writable_sources_are_copied(make):
    source = make(files.bare() + bytes(16))
    assert reason(source) == "source is writable"
    with pytest.raises(
        AlignmentError, match=r"constant 1, 32 bytes at address 0x.*copy=False forbids: source is writable"
    ):
        load(source, copy=False)


def test_graph_does_not_see_what_is_written_later():
    source = bytearray(files.inline())
    graph = load(source)
    source[:] = bytes(len(source))
    assert graph.values[1].array().tolist() == [files.ONES.tolist()]
    # The payload is still held, so nobody can take the memory away.
    with pytest.raises(BufferError):
        source.append(0)


@pytest.mark.parametrize("shift", [1, 2, 4, 8, 12])
def test_misaligned_constants_are_copied(tmp_path, shift):
    data = files.inline(bytes(shift) + files.ONES.tobytes() + bytes(32), offset=shift)
    assert reason(data) == f"address is {shift} past a multiple of 16"
    path = saved(tmp_path, data)
    graph = load(path)
    assert graph.zero_copy == (0, 1)
    assert graph.values[1].array().tolist() == [files.ONES.tolist()]
    with pytest.raises(AlignmentError, match=f"constant 1, 32 bytes at address 0x.*address is {shift} past"):
        load(path, copy=False)


@pytest.mark.parametrize("shift", range(1, 16))
def test_misaligned_buffers_give_the_same_graph(shift):
    data = files.program()
    source = memoryview(bytes(shift) + data + bytes(32))[shift : shift + len(data)]
    graph = load(source)
    assert graph.values[1].array().tolist() == [files.ONES.tolist()]
    assert graph.constants[0].in_place is (graph.constants[0].address % 16 == 0 and graph.constants[0].reason is None)


@pytest.mark.parametrize(
    ("size", "behind", "copied"),
    [
        (2 * PAGE, 0, True),
        (2 * PAGE, 16, False),
        # The rest of the last page is mapped as well.
        (2 * PAGE - 16, 0, False),
        (PAGE + 4096 // 2, 0, False),
    ],
)
def test_last_constant_of_a_file(tmp_path, size, behind, copied):
    room = size - len(files.inline(b""))
    data = files.inline(bytes(room - 32 - behind) + files.ONES.tobytes() + bytes(behind), offset=room - 32 - behind)
    assert len(data) == size
    path = saved(tmp_path, data)
    graph = load(path)
    assert graph.constants[0].offset + 32 + behind == size
    assert graph.values[1].array().tolist() == [files.ONES.tolist()]
    assert (graph.constants[0].reason is not None) is copied
    if copied:
        assert graph.constants[0].reason == "the 16 bytes behind it are not certainly readable"
        with pytest.raises(AlignmentError, match="not certainly readable"):
            load(path, copy=False)


def test_copy_is_padded_with_zeros():
    import ctypes

    (constant,) = load(files.bare(), copy=True).constants
    assert ctypes.string_at(constant.address + constant.nbytes, 64) == bytes(64)


# ---- arguments


def test_wrong_arguments():
    for options in ({"delegate": 0}, {"method": "forward"}):
        with pytest.raises(ArgumentError, match="is for programs"):
            load(files.bare(), **options)
    for index in (1, -1):
        with pytest.raises(ArgumentError, match=f"need a delegate from 0 to 0 of method 'forward', found {index}"):
            load(files.program(), delegate=index)
    with pytest.raises(ArgumentError, match="need a method of 'forward', found 'backward'"):
        load(files.program(), method="backward")
    with pytest.raises(ArgumentError, match="method 'forward' has no delegates"):
        load(files.program(files.plan(delegates=[], chains=[{"instructions": []}])), delegate=0)


def test_path_forms(tmp_path):
    path = saved(tmp_path, files.bare())
    for form in (path, str(path)):
        assert load(form).source == str(path)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none")


# ---- programs that are one graph


def test_whole_program():
    graph = load(files.program())
    assert graph.container == "pte"
    assert ([value.id for value in graph.inputs], [value.id for value in graph.outputs]) == ([0], [2])


def routed(*, values=None, inputs=(0, 1), outputs=(2, 3), args=(1, 3, 0, 2), **more):
    """A delegate of two inputs (ids 5, 6) and two outputs (7, 8); externals 2, 0, 3, 1."""
    graph = files.tree(
        xvalues=files.values(
            files.plain(5, external=2, flags=1),
            files.plain(6, external=0, flags=1),
            files.plain(7, external=3, flags=2),
            files.plain(8, external=1, flags=2),
        ),
        xnodes=[
            files.node("XNNSubtract", input1_id=5, input2_id=6, output_id=7),
            files.node("XNNSubtract", input1_id=6, input2_id=5, output_id=8),
        ],
        num_externs=4,
        constant_buffer=None,
        mem_buffer_sizes=None,
    )
    plan = files.plan(
        values=values or [files.tensor() for _ in range(6)],
        inputs=list(inputs),
        outputs=list(outputs),
        chains=[{"instructions": [files.call(0, list(args))]}],
    )
    return files.program(
        plan, segments=[b"", files.xh00(files.encode(graph, identifier=b"XN01")), *more.pop("segments", ())], **more
    )


def test_order_of_a_program_is_its_own():
    # Argument 0 is external 0 is value id 6, and so on.
    graph = load(routed())
    assert [value.id for value in graph.inputs] == [5, 6]
    assert [value.id for value in graph.outputs] == [7, 8]
    other = load(routed(inputs=(1, 0), outputs=(3, 2)))
    assert [value.id for value in other.inputs] == [6, 5]
    assert [value.id for value in other.outputs] == [8, 7]
    # By itself the delegate keeps the order of external ids.
    alone = load(routed(), delegate=0)
    assert [value.id for value in alone.inputs] == [6, 5]


def constant_tensor(**more):
    return files.tensor(allocation_info=None, data_buffer_idx=1, **more)


def test_constants_of_the_program_become_constants_of_the_graph(tmp_path):
    values = [files.tensor(), constant_tensor(), files.tensor(), files.tensor()]
    data = routed(
        values=values,
        inputs=(0,),
        segments=[files.ONES.tobytes() + bytes(16)],
        constant_segment={"segment_index": 2, "offsets": [0, 0]},
    )
    graph = load(saved(tmp_path, data))
    assert [value.id for value in graph.inputs] == [5]
    value = graph.value(6)
    assert not value.is_input and value.external_id is None
    assert value.array().tolist() == [files.ONES.tolist()]
    assert value.constant.in_place and graph.zero_copy == (1, 1)
    assert graph.owner.address <= value.constant.address < graph.owner.address + graph.owner.nbytes
    assert load(data, copy=True).value(6).constant.reason == "copy=True"
    with pytest.raises(FormatError, match="need a constant from 1 to 1, found 2"):
        load(
            routed(
                values=[
                    files.tensor(),
                    files.tensor(allocation_info=None, data_buffer_idx=2),
                    files.tensor(),
                    files.tensor(),
                ],
                inputs=(0,),
                segments=[files.ONES.tobytes()],
                constant_segment={"segment_index": 2, "offsets": [0, 0]},
            )
        )


def test_outputs_that_the_program_does_not_ask_for():
    graph = load(routed(outputs=(3,)))
    assert [value.id for value in graph.outputs] == [8]
    assert not graph.value(7).is_output
    assert "leads to no output" in graph.notes[0]


def test_inputs_that_the_delegate_does_not_take():
    values = [files.tensor() for _ in range(4)] + [files.tensor((3,)), files.tensor((2,), dtype=4)]
    graph = load(routed(values=values, inputs=(0, 4, 1)))
    assert [value.shape for value in graph.inputs] == [(1, 8), (3,), (1, 8)]
    assert "is not used" in graph.notes[-1]
    with pytest.raises(
        UnsupportedError, match="input 2 of the program is no input of the delegate, and of a type that no graph has"
    ):
        load(routed(values=values, inputs=(0, 1, 5)))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"outputs": (2, 4)}, "output 1 of the program is no output of the delegate"),
        ({"outputs": (0, 2)}, "output 0 of the program is no output of the delegate"),
        ({"args": (1, 3, 1, 2)}, "value 1 of the program is two inputs"),
        ({"args": (1, 3, 0, 3)}, "value 3 of the program is two outputs"),
        ({"inputs": (0,)}, "input value 6 of the delegate is neither input nor constant"),
        ({"inputs": (0, 1, 1)}, "lists an input twice"),
        ({"outputs": (2, 2)}, "lists an output twice"),
    ],
)
def test_routing_that_no_graph_has(changes, match):
    with pytest.raises(UnsupportedError, match=match) as caught:
        load(routed(**changes))
    assert "xnnfast.Program runs it" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "match", "kind"),
    [
        ({"args": (1, 3, 0)}, "has 4 external values, its call has 3 arguments", GraphError),
        ({"args": (1, 3, 0, 2, 4)}, "has 4 external values, its call has 5 arguments", GraphError),
        (
            {"values": [files.tensor((1, 9)), *[files.tensor()] * 3]},
            r"value 0 of method 'forward' is \[1, 9\] in memory, value 5 .* declared \[1, 8\]",
            GraphError,
        ),
        (
            {"values": [{"val": ("Int", {"int_val": 3})}, *[files.tensor()] * 3]},
            "need a tensor as value 0 of method 'forward', found Int",
            FormatError,
        ),
    ],
)
def test_routing_that_is_wrong(changes, match, kind):
    with pytest.raises(kind, match=match):
        load(routed(**changes))


def test_order_of_axes_in_memory():
    # Sizes are logical; the payload declares what lies in memory.
    graph = files.tree(
        xvalues=files.values(
            files.plain(0, external=0, flags=1, dims=(1, 4, 5, 3)),
            files.plain(2, external=1, flags=2, dims=(1, 4, 5, 3)),
        ),
        xnodes=[files.node("XNNAbs", input_id=0, output_id=2)],
        constant_buffer=None,
        mem_buffer_sizes=None,
    )
    nhwc = files.tensor((1, 3, 4, 5), dim_order=bytes((0, 2, 3, 1)))
    data = files.program(
        files.plan(values=[nhwc, nhwc]), segments=[b"", files.xh00(files.encode(graph, identifier=b"XN01"))]
    )
    assert load(data).inputs[0].shape == (1, 4, 5, 3)


def test_scalars_of_a_program_have_rank_one_in_the_payload():
    graph = files.tree(
        xvalues=files.values(
            files.plain(0, external=0, flags=1, dims=(1,)), files.plain(2, external=1, flags=2, dims=(1,))
        ),
        xnodes=[files.node("XNNAbs", input_id=0, output_id=2)],
        constant_buffer=None,
        mem_buffer_sizes=None,
    )
    data = files.program(
        files.plan(values=[files.tensor(()), files.tensor(())]),
        segments=[b"", files.xh00(files.encode(graph, identifier=b"XN01"))],
    )
    assert load(data).inputs[0].shape == (1,)


# ---- programs that are more than one graph


OPERATORS = [{"name": "aten::mean", "overload": "out"}, {"name": "aten::add", "overload": "out"}]
MOVE = {"instr_args": ("MoveCall", {"move_from": 0, "move_to": 1})}
JUMP = {"instr_args": ("JumpFalseCall", {"cond_value_index": 0, "destination_instruction": 0})}
FREE = {"instr_args": ("FreeCall", {"value_index": 0})}


@pytest.mark.parametrize(
    ("instructions", "delegates", "match"),
    [
        (
            [files.call(), files.kernel(0)],
            None,
            "1 of its 2 instructions are no delegate calls; it has 1 call of XnnpackBackend, undelegated aten::mean",
        ),
        ([files.kernel(1), files.kernel(1), files.call()], None, r"undelegated aten::add.out \(2 times\)"),
        ([files.call(), files.call()], None, "it calls delegates 2 times; it has 2 calls of XnnpackBackend"),
        ([], None, "it calls delegates 0 times; it has no instructions"),
        ([files.call(), MOVE], None, "undelegated a move"),
        ([JUMP, files.call()], None, "undelegated a jump"),
        (
            [files.call()],
            [files.delegate(1, id="CoreMLBackend")],
            "its delegate is of CoreMLBackend; it has 1 call of CoreMLBackend",
        ),
    ],
)
def test_what_is_there_is_listed(instructions, delegates, match):
    data = files.program(
        files.plan(
            chains=[{"instructions": instructions}],
            operators=OPERATORS,
            **({"delegates": delegates} if delegates else {}),
        )
    )
    with pytest.raises(UnsupportedError, match=f"method 'forward', is not one graph: .*{match}") as caught:
        load(data)
    assert "delegate=k" in str(caught.value)


def test_freeing_is_no_work():
    assert len(load(files.program(files.plan(chains=[{"instructions": [FREE, files.call(), FREE]}]))).nodes) == 1


def test_chains_and_methods():
    two = files.program(files.plan(chains=[{"instructions": [files.call()]}, {"instructions": []}]))
    with pytest.raises(UnsupportedError, match="it has 2 chains"):
        load(two)
    both = files.program(files.plan(name="a"), files.plan(name="b"))
    with pytest.raises(ArgumentError, match="need method=, one of 'a', 'b'"):
        load(both)
    assert len(load(both, method="b").nodes) == 1
    assert [graph.source.rpartition(": ")[2] for graph in load_all(both)] == [
        "method 'a', delegate 0",
        "method 'b', delegate 0",
    ]
    with pytest.raises(FormatError, match=r"need a method, .* has none"):
        load(
            files.with_segments(
                [], lambda places: files.encode({"version": 0}, schema_key="program", identifier=b"ET12"), b"eh00"
            )
        )


def test_load_all_of_one_graph():
    assert [graph.dialect for graph in load_all(files.seed())] == ["seed"]


# ---- quick refusals


@pytest.mark.parametrize(
    "make",
    [
        lambda: files.bare(files.tree(num_externs=4_000_000_000)),
        lambda: files.bare(files.tree(xnodes=None)),
        lambda: files.bare(files.tree(xvalues=None)),
        lambda: files.bare(files.tree(xvalues=[])),
    ],
)
def test_refusals_cost_nothing(tmp_path, make):
    path = saved(tmp_path, make())
    script = "\n".join(
        (
            "import time",
            "start = time.perf_counter()",
            "try:",
            "    load(sys.argv[1])",
            "    raise SystemExit('loaded')",
            "except XnnfastError:",
            "    assert time.perf_counter() - start < 1",
        )
    )
    resident, mapped = memory_after(script, path)
    assert resident < 50_000 and mapped < 50_000


def test_good_file_loads_after_every_refusal():
    good = files.program()
    for bad in (b"", b"x" * 7, files.bare()[:100], good[:300], files.bare(files.tree(num_externs=5))):
        with pytest.raises(XnnfastError):
            load(bad)
        assert len(load(good).nodes) == 1


# ---- what ExecuTorch wrote


@files.needs_shared
@pytest.mark.parametrize("name", ["model.pte", "payload_inline.xnnpack", "payload_buffers.fb", "seed.fb"])
def test_exported_files_load(name):
    paths = files.shared_files(name)
    assert paths
    count = 0
    for path in paths:
        for graph in load_all(path, copy=False):
            count += 1
            assert graph.zero_copy == (len(graph.constants),) * 2
            assert graph.nodes and graph.outputs
    if name == "model.pte":
        assert count >= 210


@files.needs_shared
def test_exported_programs_that_are_one_graph():
    """load() takes exactly those that the exporter calls wholly delegated and that call one delegate."""
    checked = 0
    for path in files.shared_files("model.pte"):
        meta = json.loads((path.parent / "meta.json").read_text())
        whole = meta["wholly_delegated"] and meta["n_delegate_calls"] == 1
        if not whole:
            with pytest.raises(UnsupportedError):
                load(path)
            continue
        graph = load(path)
        plan = ProgramFile(path).plan()
        assert [value.shape for value in graph.inputs] == [plan.values[index].shape for index in plan.inputs]
        assert [value.shape for value in graph.outputs] == [plan.values[index].shape or (1,) for index in plan.outputs]
        checked += 1
    assert checked >= 130


@files.needs_shared
def test_older_forms_are_the_same_graph():
    for folder in sorted((files.SHARED / "conformance").iterdir()):
        forms = [
            folder / name
            for name in ("payload_inline.xnnpack", "payload_buffers.fb", "seed.fb")
            if (folder / name).exists()
        ]
        if not forms:
            continue
        graphs = [load(form) for form in forms] + [load(folder / "model.pte", delegate=0)]
        for graph in graphs[1:]:
            assert [(value.id, value.datatype, value.shape) for value in graph.values] == [
                (value.id, value.datatype, value.shape) for value in graphs[0].values
            ], folder.name
            assert [(node.op, node.inputs, node.outputs) for node in graph.nodes] == [
                (node.op, node.inputs, node.outputs) for node in graphs[0].nodes
            ], folder.name
            for one, two in zip(graph.values, graphs[0].values):
                assert (one.constant is None) == (two.constant is None)
                if one.constant is not None:
                    assert bytes(one.constant.data)[: one.nbytes] == bytes(two.constant.data)[: one.nbytes], folder.name


def test_limit_of_workspace_names_its_option():
    with pytest.raises(LimitError, match="max_workspace"):
        from xnnfast.caps import Limits

        load(files.bare(), limits=Limits(max_workspace=10))

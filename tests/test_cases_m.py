"""Faults that others had, classes M and O: programs that are more than one delegate, and files beyond 2 and 4 GiB."""

from __future__ import annotations

import struct
import subprocess
import sys
import textwrap

import files
import numpy as np
import pytest

from xnnfast import FormatError, Program, Runtime, UnsupportedError, load, load_all

X = np.arange(8, dtype=np.float32).reshape(1, 8)


# ---- M3


def plan(*instructions, values=4, **changes):
    """A method over tensors of 1x8: value 0 in, value 2 out."""
    changes.setdefault("outputs", [2])
    return files.plan(
        values=[files.tensor() for _ in range(values)], chains=[{"instructions": list(instructions)}], **changes
    )


def negation(source, target):
    return files.kernel(0, (source, target, target))


def test_M3_a_kernel_beside_the_delegate():
    operators = [{"name": "aten::neg", "overload": "out"}]
    data = files.program(plan(files.call(0, (0, 1)), negation(1, 2), operators=operators))
    with pytest.raises(
        UnsupportedError, match=r"1 call of XnnpackBackend, undelegated aten::neg\.out.*Program"
    ):
        load(data)
    # The payload alone is half of the answer, and asked for by name.
    np.testing.assert_array_equal(Runtime(load(data, delegate=0)).run(X)[0], X + files.ONES)
    program = Program(data)
    assert [call.op for call in program.undelegated] == ["aten::neg.out"]
    np.testing.assert_array_equal(program.run(X)[0], -(X + files.ONES))


def test_M3_a_kernel_that_nobody_has():
    operators = [{"name": "custom::thing", "overload": "out"}]
    data = files.program(plan(files.call(0, (0, 1)), negation(1, 2), operators=operators))
    with pytest.raises(UnsupportedError, match=r"undelegated custom::thing\.out"):
        load(data)
    with pytest.raises(UnsupportedError, match=r"custom::thing\.out"):
        Program(data).run(X)


def test_M3_two_delegates_in_sequence():
    delegates = [files.delegate(1), files.delegate(2)]
    data = files.program(
        plan(files.call(0, (0, 1)), files.call(1, (1, 2)), delegates=delegates),
        segments=[b"", files.inline(), files.inline()],
    )
    with pytest.raises(UnsupportedError, match="calls delegates 2 times"):
        load(data)
    assert len(load_all(data)) == 2
    np.testing.assert_array_equal(Program(data).run(X)[0], X + 2 * files.ONES)


def test_M3_another_backend():
    data = files.program(plan(files.call(0, (0, 2)), delegates=[files.delegate(1, id="OtherBackend")]))
    with pytest.raises(UnsupportedError, match="its delegate is of OtherBackend"):
        load(data)
    with pytest.raises(FormatError, match="OtherBackend"):
        load(data, delegate=0)
    with pytest.raises(UnsupportedError, match="backend OtherBackend"):
        Program(data).run(X)
    assert load_all(data) == []


def test_M3_methods_are_picked_by_name():
    first = files.plan(name="first")
    second = files.plan(name="second", delegates=[files.delegate(2)])
    doubled = files.inline((2 * files.ONES).tobytes() + bytes(16))
    data = files.program(first, second, segments=[b"", files.inline(), doubled])
    with pytest.raises(TypeError, match=r"method=.*'first', 'second'"):
        load(data)
    for name, factor in (("first", 1), ("second", 2)):
        np.testing.assert_array_equal(Runtime(load(data, method=name)).run(X)[0], X + factor * files.ONES)
        np.testing.assert_array_equal(Program(data).run(X, method=name)[0], X + factor * files.ONES)


# ---- O5


def sparse(path, start, *, flatbuffer=None):
    """A payload with header whose constant lies that far into the file, most of which is a hole."""
    encoded = files.encode(files.headed_tree({"offset": start, "size": 32}), identifier=b"XN01")
    size = len(encoded) if flatbuffer is None else flatbuffer
    area = max(4096, 32 + size)
    head = struct.pack("<I4sHIIIQ", 0, b"XH00", 30, 32, size, area, start + 4096).ljust(32, b"\0")
    with open(path, "wb") as stream:
        stream.write(head + encoded)
        stream.seek(area + start)
        stream.write(files.ONES.tobytes())
        stream.truncate(area + start + 4096)
    return path


OPEN = """
    import sys
    import numpy as np
    from xnnfast import Runtime, load

    def status(name):
        return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

    before = status("VmHWM")
    graph = load(sys.argv[1], copy=False)
    (y,) = Runtime(graph).run(np.zeros((1, 8), np.float32))
    print(y.tolist(), graph.owner.nbytes, status("VmHWM") - before)
"""


def test_O5_constants_beyond_four_gibibytes_are_mapped(tmp_path):
    path = sparse(tmp_path / "far.xnn", (4 << 30) + 4096)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(OPEN), str(path)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    values, nbytes, grown = done.stdout.rsplit(maxsplit=2)
    assert values == str([files.ONES.tolist()])
    assert int(nbytes) > 4 << 30 and int(grown) < 30_000


@pytest.mark.parametrize("size", [2**31, 2**31 + 4096, 2**32 - 4096])
def test_O5_a_flatbuffer_of_two_gibibytes_is_refused(tmp_path, size):
    path = sparse(tmp_path / "huge.xnn", 0, flatbuffer=size)
    with pytest.raises(FormatError, match=f"at most 2147483647 bytes, found {size}"):
        load(path)


def test_O5_one_byte_less_is_read(tmp_path):
    path = sparse(tmp_path / "large.xnn", 0, flatbuffer=2**31 - 16)
    np.testing.assert_array_equal(Runtime(load(path)).run(X)[0], X + files.ONES)

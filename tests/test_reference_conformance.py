"""The interpreter against ExecuTorch's own runtime, on programs that ExecuTorch exported."""

import json
import pathlib

import numpy as np
import pytest

from xnnfast import reference
from xnnfast.errors import UnsupportedError
from xnnfast.load import load

FOLDER = pathlib.Path(__file__).parents[2] / "shared" / "conformance"
# Of the largest expected number. ExecuTorch has a newer XNNPACK: an 8-bit net may differ by a step, and its fp16
# sums were made in fp16 in places.
TOLERANCE = {"fp32": 1e-6, "fp16": 4e-3, "qs8": 5e-3, "qs8_pt": 1e-6, "qd8": 1e-6, "qc4w": 1e-6, "qb4w": 1e-6}
FORMS = ("payload_inline.xnnpack", "payload_buffers.fb", "seed.fb")

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the conformance programs are not here")


def programs(whole):
    for path in sorted(FOLDER.glob("*/meta.json")):
        meta = json.loads(path.read_text())
        files = ["model.pte"] * bool(meta["wholly_delegated"]) if whole else [
            form for form in FORMS if (path.parent / form).exists()]
        for file in files:
            yield pytest.param(path.parent, meta, file, id=f"{path.parent.name}/{file}")


def stored(folder, stem, tag, count):
    return [np.load(folder / f"{stem}{f'_{tag}' if tag else ''}_{index}.npy") for index in range(count)]


def compare(folder, meta, graph, fed):
    for case in meta["sets"]:
        tag = (case["tag"] or "").lstrip("_")
        inputs = stored(folder, "input", tag, len(case["inputs"]))
        wanted = stored(folder, "expected_et", tag, len(case["outputs"]))
        results = reference.run(graph, *fed(inputs))
        assert len(results) == len(wanted)
        for got, want in zip(results, wanted):
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
            if got.dtype.kind != "f":
                np.testing.assert_array_equal(got, want)
                continue
            largest = np.abs(want[np.isfinite(want)].astype(np.float64)).max(initial=0)
            np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=0,
                                       atol=TOLERANCE[meta["variant"]] * largest)


@pytest.mark.parametrize(("folder", "meta", "file"), list(programs(whole=True)))
def test_whole_programs_agree(folder, meta, file):
    try:
        graph = load(folder / file)
    except UnsupportedError as reason:
        # A program may have an input that its delegate does not; it is one graph no more.
        assert "is no input of the delegate" in str(reason)
        return
    compare(folder, meta, graph, lambda inputs: inputs)


@pytest.mark.parametrize(("folder", "meta", "file"), list(programs(whole=False)))
def test_older_forms_agree(folder, meta, file):
    graph = load(folder / file)
    bound = [arg for arg in meta.get("delegate_args", ()) if "user_output" not in arg]

    def fed(inputs):
        """What the program gives its delegate: inputs of its own and constants."""
        return [inputs[arg["user_input"]] if "user_input" in arg
                else np.array(arg["value"], value.dtype).reshape(value.shape)
                for arg, value in zip(bound, graph.inputs)] or inputs

    compare(folder, meta, graph, fed)

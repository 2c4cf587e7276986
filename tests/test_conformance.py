"""Programs that ExecuTorch exported, through load and Runtime, against the outputs of ExecuTorch's own runtime."""

import json
import pathlib

import numpy as np
import pytest

import xnnfast as xf
from xnnfast import Runtime

FOLDER = pathlib.Path(__file__).parents[2] / "shared" / "conformance"
# Of the largest expected number, by the folder's README. ExecuTorch has a newer XNNPACK, so 8-bit nets may differ by
# a step.
TOLERANCE = {"fp32": 1e-5, "fp16": 4e-3, "qs8": 1.5e-2, "qs8_pt": 1.5e-2, "qd8": 2e-2, "qc4w": 2e-2, "qb4w": 2e-2}
FORMS = ("payload_inline.xnnpack", "payload_buffers.fb", "seed.fb")

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the conformance programs are not here")


def metas():
    return {path.parent: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*/meta.json"))}


WHOLE = [pytest.param(folder, meta, id=folder.name) for folder, meta in metas().items() if meta["wholly_delegated"]]
OLDER = [pytest.param(folder, meta, form, id=f"{folder.name}-{form}")
         for folder, meta in metas().items() for form in FORMS if (folder / form).exists()]


def arrays(folder, stem, tag, count):
    return [np.load(folder / f"{stem}{f'_{tag}' if tag else ''}_{index}.npy") for index in range(count)]


def sets(folder, meta):
    """(inputs, ExecuTorch's outputs) of every batch or size that was recorded."""
    for each in meta["sets"]:
        tag = (each["tag"] or "").lstrip("_")
        yield (arrays(folder, "input", tag, len(each["inputs"])),
               arrays(folder, "expected_et", tag, len(each["outputs"])))


def agree(got, want, tolerance):
    assert len(got) == len(want)
    for one, other in zip(got, want):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        if one.dtype.kind != "f":
            np.testing.assert_array_equal(one, other)
            continue
        largest = np.abs(other[np.isfinite(other)].astype(np.float64)).max(initial=0)
        np.testing.assert_allclose(one.astype(np.float64), other.astype(np.float64), rtol=0, atol=tolerance * largest)


@pytest.mark.parametrize(("folder", "meta"), WHOLE)
def test_whole_program(folder, meta):
    runtime = Runtime(xf.load(folder / "model.pte"))
    for inputs, want in sets(folder, meta):
        agree(runtime.run(*inputs), want, TOLERANCE[meta["variant"]])


@pytest.mark.parametrize(("folder", "meta", "form"), OLDER)
def test_older_form(folder, meta, form):
    # A delegate by itself: what the program gives it besides the user's inputs has to be fed.
    graph = xf.load(folder / form)
    bound = [arg for arg in meta.get("delegate_args", ()) if "user_output" not in arg]
    runtime = Runtime(graph)
    for inputs, want in sets(folder, meta):
        fed = [inputs[arg["user_input"]] if "user_input" in arg
               else np.array(arg["value"], value.dtype).reshape(value.shape)
               for arg, value in zip(bound, graph.inputs)] or inputs
        agree(runtime.run(*fed), want, TOLERANCE[meta["variant"]])


def test_nothing_is_left_out():
    assert len(WHOLE) >= 135 and len(OLDER) >= 265

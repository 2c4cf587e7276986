"""What the weights cache is worth: creation, start of a process, and memory, against packing every time.

    python bench/bench_cache.py [--model resnet50] [--rounds 9] [--peers NAME ...]

* create: ``Runtime(graph)`` against ``Runtime(graph, weights_cache=...)``, on a freshly loaded graph each time, in
  turns in one process. The gate: the best of one at least 50 times faster than the best of the other; medians are
  printed too.
* start: from starting a process to its first result, imports included, in turns, also of peers with files of the same
  network (bench/peers/start_peer.py), LiteRT with and without its own cache of packed weights.
* memory: anonymous memory that load and creation add to a process, and what the first call adds to that besides the
  workspace. The gate: at most 5 MB in all with a cache, with ``low_memory``; without, convolutions keep buffers of
  pointers to their inputs' pixels, in the same way as without a cache. Then private and proportional memory of ten
  processes at once.

Results of all are compared bit by bit. Ends with status 1 if a gate is missed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import cases
import numpy as np

import xnnfast
from xnnfast import Runtime

HERE = Path(__file__).resolve().parent
PEERS = ("litert", "executorch", "executorch_numpy", "onnxruntime")
GATE_CREATE = 50
GATE_ANONYMOUS = 5_000_000

CHILD = """
import sys
import numpy, xnnfast
from xnnfast import Runtime
model, x, where, keep = sys.argv[1:]
def counts():
    with open("/proc/self/smaps_rollup") as lines:
        pairs = [line.partition(":") for line in lines]
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in pairs if rest.rstrip().endswith("kB")}
x = numpy.load(x)
if keep != "-":
    before = counts()
runtime = Runtime(xnnfast.load(model), weights_cache=where or None, low_memory=keep == "low_memory")
if keep != "-":
    created = counts()
(y,) = runtime.run(x)
print(runtime.weights_cache, flush=True)
if keep != "-":
    import hashlib, json
    after = counts()
    print(json.dumps({
        "created": created["Anonymous"] - before["Anonymous"], "called": after["Anonymous"] - before["Anonymous"],
        "workspace": runtime.memory["workspace"], "digest": hashlib.sha256(y.tobytes()).hexdigest(),
    }), flush=True)
    sys.stdin.readline()
    print(json.dumps(counts()), flush=True)
    sys.stdin.readline()
"""


def create(path: Path, where: Path, rounds: int, want: bytes, x: Any) -> dict[str, Any]:
    times: dict[str, list[float]] = {"pack": [], "warm": []}
    for _ in range(rounds):
        for name, cache in (("pack", None), ("warm", where)):
            graph = xnnfast.load(path)
            start = time.perf_counter()
            runtime = Runtime(graph, weights_cache=cache)
            times[name].append(time.perf_counter() - start)
            assert runtime.weights_cache == ("off" if cache is None else "hit")
            assert runtime.run(x)[0].tobytes() == want
            del runtime, graph
    ratios = [pack / warm for pack, warm in zip(times["pack"], times["warm"])]
    return {
        "pack_ms": 1e3 * statistics.median(times["pack"]),
        "warm_ms": 1e3 * statistics.median(times["warm"]),
        "pack_best_ms": 1e3 * min(times["pack"]),
        "warm_best_ms": 1e3 * min(times["warm"]),
        "times_faster": min(times["pack"]) / min(times["warm"]),
        "median_ratio": statistics.median(ratios),
    }


def start(commands: dict[str, list[str]], rounds: int) -> dict[str, dict[str, float]]:
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            begun = time.perf_counter()
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            assert child.stdout is not None
            line = child.stdout.readline()
            times[name].append(time.perf_counter() - begun)
            child.communicate()
            assert line and child.returncode == 0, (name, line)
    return {
        name: {"median_ms": 1e3 * statistics.median(taken), "best_ms": 1e3 * min(taken)}
        for name, taken in times.items()
    }


def peers_commands(names: list[str], graph: Any, folder: Path, array: Path) -> dict[str, list[str]]:
    """What starts the peers, each with a file of its own format; those with a cache have filled it."""
    sys.path.insert(0, str(HERE / "peers"))
    import environments
    import onnx_export
    import pte_export
    import tflite_export

    commands: dict[str, list[str]] = {}
    for name in names:
        python = environments.make(name)
        model = folder / f"model.{ {'litert': 'tflite', 'onnxruntime': 'onnx'}.get(name, 'pte') }"
        given = array
        if name == "litert":
            tflite_export.export(graph, model, next((python.parent.parent / "lib").glob("python3*/site-packages")))
        elif name == "onnxruntime":
            onnx_export.export(graph, model)
            if onnx_export.image_inputs(graph)[0]:
                given = folder / "turned.npy"
                np.save(given, np.ascontiguousarray(np.load(array).transpose(0, 3, 1, 2)))
        else:
            pte_export.export(graph, model)
        command = [str(python), str(HERE / "peers/start_peer.py"), name, str(model), str(given)]
        commands[name] = command
        if name == "litert":
            commands["litert, its cache"] = [*command, str(folder / "litert.cache")]
            subprocess.run(commands["litert, its cache"], check=True, capture_output=True)
            assert (folder / "litert.cache").stat().st_size
    return commands


def together(command: list[str], count: int) -> dict[str, Any]:
    """Memory of processes that all have had their first result."""
    children = []
    facts: list[dict[str, Any]] = []
    for _ in range(count):
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        facts.append(json.loads(child.stdout.readline()))
        children.append(child)
    counts = []
    for child in children:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write("\n")
        child.stdin.flush()
        counts.append(json.loads(child.stdout.readline()))
    for child in children:
        child.communicate("\n")
    assert len({each["digest"] for each in facts}) == 1
    return {
        "digest": facts[0]["digest"],
        "created": statistics.median(each["created"] for each in facts),
        "more": statistics.median(each["called"] for each in facts) - facts[0]["workspace"],
        "workspace": facts[0]["workspace"],
        "pss": sum(each["Pss"] for each in counts),
        "private": sum(each["Private_Clean"] + each["Private_Dirty"] for each in counts),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50", choices=cases.names())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=None, help="where the model and the cache are put meanwhile")
    parser.add_argument("--peers", nargs="*", default=[], choices=PEERS, metavar="NAME", help=", ".join(PEERS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        model, where, array = folder / "model.xnn", folder / "cache", folder / "x.npy"
        cases.build(options.model).save(model)
        graph = xnnfast.load(model)
        x = np.random.default_rng(0).standard_normal(graph.inputs[0].shape, np.float32)
        np.save(array, x)
        runtime = Runtime(graph)
        want = runtime.run(x)[0].tobytes()
        packed = runtime.memory["packed"]
        del runtime, graph
        print(f"{options.model}: {packed / 1e6:.1f} MB of packed weights, {', '.join(xnnfast.config()['isa'][-3:])}")
        # Files that are younger than the settling time are read in full at every use.
        time.sleep(2.5)
        for outcome in ("saved", "hit"):
            for low in (False, True):
                assert Runtime(xnnfast.load(model), low_memory=low, weights_cache=where).weights_cache == outcome
            time.sleep(2.5)

        made = create(model, where, options.rounds, want, x)
        print("create    pack {pack_best_ms:.1f} ms (median {pack_ms:.1f}), warm {warm_best_ms:.2f} ms (median "
              "{warm_ms:.2f}): {times_faster:.0f} times faster (median of ratios {median_ratio:.0f})".format(**made))

        child = [sys.executable, "-c", CHILD, str(model), str(array)]
        commands = {"no cache": [*child, "", "-"], "cache": [*child, str(where), "-"]}
        commands |= peers_commands(options.peers, xnnfast.load(model), folder, array)
        for name, each in start(commands, options.rounds).items():
            print(f"start     {name}: {each['median_ms']:.0f} ms to the first result (best {each['best_ms']:.0f})")

        digest = hashlib.sha256(want).hexdigest()
        for name, option in (("no cache", "keep"), ("cache", "keep"), ("cache", "low_memory")):
            counts = together([*commands[name][:-1], option], options.processes)
            assert counts["digest"] == digest
            more = counts["more"]
            size = {key: f"{counts[key] / 1e6:.1f} MB" for key in ("created", "more", "workspace", "pss", "private")}
            print(
                f"memory    {name}{', low_memory' if option != 'keep' else ''}: anonymous {size['created']} after "
                f"creation, after a call {size['more']} and the workspace of {size['workspace']}; {options.processes} "
                f"processes: PSS {size['pss']}, private {size['private']}"
            )
    missed = []
    if made["times_faster"] < GATE_CREATE:
        missed.append(f"creation is {made['times_faster']:.0f} times faster, need {GATE_CREATE}")
    if more > GATE_ANONYMOUS:
        missed.append(f"{more / 1e6:.1f} MB besides the workspace, need at most {GATE_ANONYMOUS / 1e6:.0f}")
    print("; ".join(missed) or "gates passed")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())

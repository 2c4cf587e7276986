"""One measurement of one peer, in a process of its own and in that peer's environment: a job in, a line of JSON out.

    python peer.py '{"peer": "onnxruntime", "model": ..., "inputs": [...], "threads": 1, "seconds": 0.5,
                     "slices": 8, "output": ...}'

Answers how long importing, loading and the first call took, the samples of steady calls, CPU time and memory. Works by
turns: it says ``ready`` when it is warm, takes one of ``slices`` parts of the samples at each line ``go`` and says
``done``, and answers at any other line.
"""

import json
import os
import resource
import sys
import time

import numpy as np


def resident():
    with open("/proc/self/statm") as stream:
        return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# Each gives a function of no arguments that runs the model on the inputs, made in two steps: import, then load.


def xnnfast(job):
    import xnnfast
    from xnnfast.executor import Executor

    xnnfast.Runtime, xnnfast.Program  # noqa: B018

    def load():
        if job["batch"] > 1:
            executor = Executor(job["model"], workers=job["threads"])
            return lambda arrays: executor.run(*arrays)
        try:
            graph = xnnfast.load(job["model"])
        except xnnfast.UnsupportedError:
            program = xnnfast.Program(job["model"], threads=job["threads"])
            return lambda arrays: program.run(*arrays)
        runtime = xnnfast.Runtime(graph, threads=job["threads"])
        return lambda arrays: runtime.run(*arrays)

    return load


def executorch(job):
    import torch
    from executorch.extension.pybindings import portable_lib
    from executorch.runtime import Runtime

    portable_lib._unsafe_reset_threadpool(job["threads"])

    def load():
        program = Runtime.get().load_program(job["model"])
        method = program.load_method("forward")

        def run(arrays, keep=program):
            return [each.numpy() for each in method.execute([torch.from_numpy(array) for array in arrays])]

        return run

    return load


def executorch_numpy(job):
    from executorch_numpy_runtime import Runtime

    def load():
        program = Runtime.get().load_program(job["model"])
        method = program.load_method("forward")
        return lambda arrays, keep=program: method(list(arrays))

    return load


def onnxruntime(job):
    import onnxruntime as ort

    def load():
        options = ort.SessionOptions()
        options.intra_op_num_threads = job["threads"]
        session = ort.InferenceSession(job["model"], options, providers=["CPUExecutionProvider"])
        names = [each.name for each in session.get_inputs()]
        return lambda arrays: session.run(None, dict(zip(names, arrays)))

    return load


def openvino(job):
    import openvino as ov

    def load():
        hints = {
            "INFERENCE_NUM_THREADS": job["threads"],
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
        }
        core = ov.Core()
        model = core.read_model(job["model"])
        # A batch that may be anything costs it more than one that is known.
        model.reshape({each: list(array.shape) for each, array in zip(model.inputs, job["arrays"])})
        compiled = core.compile_model(model, "CPU", hints)
        request = compiled.create_infer_request()
        count = len(compiled.outputs)

        def run(arrays):
            found = request.infer(list(arrays), share_inputs=True)
            return [found[i] for i in range(count)]

        return run

    return load


def litert(job):
    from ai_edge_litert.interpreter import Interpreter

    def load():
        interpreter = Interpreter(job["model"], num_threads=job["threads"])
        inputs, outputs = interpreter.get_input_details(), interpreter.get_output_details()
        for each, array in zip(inputs, job["arrays"]):
            if tuple(each["shape"]) != array.shape:
                interpreter.resize_tensor_input(each["index"], array.shape)
        interpreter.allocate_tensors()

        def run(arrays):
            for each, array in zip(inputs, arrays):
                interpreter.set_tensor(each["index"], array)
            interpreter.invoke()
            return [interpreter.get_tensor(each["index"]) for each in outputs]

        return run

    return load


def torch(job):
    import torch
    from torch_export import program

    torch.set_num_threads(job["threads"])
    return lambda: program(job["model"])


PEERS = {f.__name__: f for f in (torch, xnnfast, executorch, executorch_numpy, onnxruntime, openvino, litert)}


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = json.loads(sys.argv[1])
    if "path" in job:
        sys.path.insert(0, job["path"])
    if "range" in job:
        pile(job, answers)
        os._exit(0)
    arrays = job["arrays"] = [np.load(name) for name in job["inputs"]]
    start, begin = time.perf_counter(), resident()
    load = PEERS[job["peer"]](job)
    imported, base = time.perf_counter(), resident()
    run = load()
    loaded = time.perf_counter()
    if job.get("one_by_one"):
        # A program with a fixed batch of one: the loop is the user's.
        single, count = run, job["batch"]

        def run(arrays):
            parts = [single([array[i : i + 1] for array in arrays]) for i in range(count)]
            return [np.concatenate([np.asarray(part[k]) for part in parts]) for k in range(len(parts[0]))]

    began = time.perf_counter()
    results = [np.array(each) for each in run(arrays)]
    first = time.perf_counter()
    np.savez(job["output"], *results)
    end = time.perf_counter() + job["seconds"] / 2
    while time.perf_counter() < end:
        run(arrays)
    print("ready", file=answers, flush=True)
    samples, cpu = [], 0.0
    for line in sys.stdin:
        if line != "go\n":
            break
        # What others left in the caches is not this one's to pay for.
        run(arrays)
        end, before = time.perf_counter() + job["seconds"] / job["slices"], time.process_time()
        while True:
            start_call = time.perf_counter_ns()
            run(arrays)
            samples.append(time.perf_counter_ns() - start_call)
            if time.perf_counter() >= end:
                break
        cpu += time.process_time() - before
        print("done", file=answers, flush=True)
    answer = {
        "import_s": imported - start,
        "load_s": loaded - imported,
        "first_s": first - began,
        "samples_ns": samples,
        "cpu_s": cpu / max(len(samples), 1),
        "import_bytes": base - begin,
        "model_bytes": resident() - base,
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "version": version(job["peer"]),
    }
    print(json.dumps(answer), file=answers, flush=True)
    # Some leave threads behind that keep the process.
    os._exit(0)


def pile(job, answers):
    """A part of a pile of samples in batches, each time a line says so."""
    first, last = job["range"]
    # Some refuse arrays that they could not write to.
    whole = [np.load(name, mmap_mode="c")[first:last] for name in job["inputs"]]
    # Peers that make themselves ready for a shape get that of a batch.
    count, size = last - first, job["batch"]
    job["arrays"] = [np.ascontiguousarray(array[:size]) for array in whole]
    one = PEERS[job["peer"]](job)()
    results = None

    def work():
        nonlocal results
        for start in range(0, count, size):
            found = one([array[start : start + size] for array in whole])
            if size >= count:
                results = found
                return
            if results is None:
                results = [np.empty((count, *np.shape(each)[1:]), np.asarray(each).dtype) for each in found]
            for whole_result, each in zip(results, found):
                whole_result[start : start + size] = each

    one(job["arrays"])
    one(job["arrays"])
    for array in whole:
        # All of it in memory.
        array.ravel()[::1024].sum()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        if line == "go\n":
            work()
            print("done", file=answers, flush=True)
        else:
            np.savez(job["output"], *results)
            print("saved", file=answers, flush=True)


def version(peer):
    from importlib import metadata

    names = {"litert": "ai-edge-litert", "executorch_numpy": "executorch-numpy-runtime"}
    try:
        return metadata.version(names.get(peer, peer))
    except metadata.PackageNotFoundError:
        return "from the sources"


if __name__ == "__main__":
    main()

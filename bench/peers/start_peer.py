"""From nothing to a first result, in one peer's environment: ``python start_peer.py PEER MODEL INPUT.npy [CACHE]``.

Prints a line when the result is there. CACHE is where a peer may keep packed weights.
"""

import sys

import numpy as np


def executorch(model, x, cache):
    import torch
    from executorch.extension.pybindings import portable_lib
    from executorch.runtime import Runtime

    portable_lib._unsafe_reset_threadpool(1)
    program = Runtime.get().load_program(model)
    return program.load_method("forward").execute([torch.from_numpy(x)])[0].numpy()


def executorch_numpy(model, x, cache):
    from executorch_numpy_runtime import Runtime

    program = Runtime.get().load_program(model)
    return program.load_method("forward")([x])[0]


def litert(model, x, cache):
    if not cache:
        from ai_edge_litert.interpreter import Interpreter

        interpreter = Interpreter(model, num_threads=1)
        interpreter.allocate_tensors()
        interpreter.set_tensor(interpreter.get_input_details()[0]["index"], x)
        interpreter.invoke()
        return interpreter.get_tensor(interpreter.get_output_details()[0]["index"])
    # Only this interface has the cache.
    from ai_edge_litert.compiled_model import CompiledModel
    from ai_edge_litert.cpu_options import CpuOptions
    from ai_edge_litert.hardware_accelerator import HardwareAccelerator
    from ai_edge_litert.options import Options

    options = Options(
        hardware_accelerators=HardwareAccelerator.CPU,
        cpu_options=CpuOptions(num_threads=1, xnnpack_weight_cache_path=cache),
    )
    compiled = CompiledModel.from_file(model, options=options)
    (given,), (made,) = compiled.create_input_buffers(0), compiled.create_output_buffers(0)
    given.write(x)
    compiled.run_by_index(0, [given], [made])
    shape = compiled.get_output_tensor_details(next(iter(compiled.get_signature_list())))
    (details,) = shape.values()
    return made.read(int(np.prod(details["shape"])), np.float32).reshape(details["shape"])


def onnxruntime(model, x, cache):
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})[0]


def main():
    peer, model, x, *cache = sys.argv[1:]
    y = globals()[peer](model, np.load(x), *cache or [None])
    y = np.asarray(y)
    print("first result", y.shape, float(np.abs(y).max()), flush=True)


if __name__ == "__main__":
    main()

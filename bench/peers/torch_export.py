"""A graph as a list of steps for PyTorch: the operators of the models in bench/, fp32.

The file is a .npz: a JSON text with the steps, and the constants that they name. ``program`` runs in the peer's
environment and makes a function of the file. Values stay as they are here, images with channels last in memory, which
is PyTorch's faster layout too.
"""

import json

import numpy as np

BINARY = {"add": "add", "subtract": "sub", "multiply": "mul"}
UNARY = {"gelu": "gelu", "square": "square", "reciprocal_square_root": "rsqrt", "clamp": "alias"}


class Unknown(ValueError):
    """A graph with something that is not written here."""


def export(graph, path):
    """Write the steps. Values are named by their ids."""
    constants, steps = {}, []

    def name(id):
        value = graph.value(id)
        if value.constant is not None:
            constants[str(id)] = value.array()
        return str(id)

    for value in graph.values:
        if value.quantization is not None:
            raise Unknown(f"value {value.id} is {value.datatype}")
    for node in graph.nodes:
        kind, attrs = node.op.name, {key: int(each) for key, each in node.attrs.items() if np.ndim(each) == 0}
        known = ("conv2d", "depthwise_conv2d", "max_pooling2d", "global_average_pooling2d", "fully_connected",
                 "static_reshape", "static_transpose", "scaled_dot_product_attention", *BINARY, *UNARY)  # fmt: skip
        if kind not in known:
            raise Unknown(f"no way to write {node.where}")
        ins = [name(id) for id in node.inputs if id is not None]
        if kind == "conv2d":
            constants[ins[1]] = constants[ins[1]].transpose(0, 3, 1, 2)
        elif kind == "depthwise_conv2d":
            constants[ins[1]] = constants[ins[1]].transpose(3, 0, 1, 2)
        elif kind == "static_transpose":
            attrs["perm"] = [int(axis) for axis in node.attrs["perm"]]
        attrs["shape"] = [-1, *graph.value(node.outputs[0]).shape[1:]]
        limits = None
        if node.clamp is not None:
            limits = [None if bound is None or np.isinf(bound) else float(bound) for bound in node.clamp]
        steps.append([kind, ins, str(node.outputs[0]), attrs, limits])
    ends = [[str(value.id) for value in values] for values in (graph.inputs, graph.outputs)]
    np.savez(path, program=json.dumps([steps, ends]), **constants)


def program(path):
    """A function from arrays to arrays."""
    import torch
    from torch.nn import functional as F

    with np.load(path) as file:
        steps, (inputs, outputs) = json.loads(str(file["program"]))
        held = {name: torch.from_numpy(np.ascontiguousarray(file[name])) for name in file.files if name != "program"}
    used = {}
    for _, ins, _, _, _ in steps:
        for name in ins:
            used[name] = used.get(name, 0) + 1

    def conv(x, w, b=None, *, attrs):
        w = w.contiguous(memory_format=torch.channels_last)
        top, left, bottom, right = (attrs[f"padding_{side}"] for side in ("top", "left", "bottom", "right"))
        stride = attrs["subsampling_height"], attrs["subsampling_width"]
        dilation = attrs["dilation_height"], attrs["dilation_width"]
        even = (top, left) == (bottom, right)

        def run(x):
            x = x.permute(0, 3, 1, 2)
            if not even:
                x = F.pad(x, (left, right, top, bottom))
            y = F.conv2d(x, w, b, stride, (top, left) if even else 0, dilation, attrs["groups"])
            return y.permute(0, 2, 3, 1)

        return run

    def pool(attrs):
        top, left, bottom, right = (attrs[f"padding_{side}"] for side in ("top", "left", "bottom", "right"))
        size, stride = ((attrs[f"{what}_height"], attrs[f"{what}_width"]) for what in ("pooling", "stride"))

        def run(x):
            x = x.permute(0, 3, 1, 2)
            if top or left or bottom or right:
                x = F.pad(x, (left, right, top, bottom), value=-torch.inf)
            return F.max_pool2d(x, size, stride).permute(0, 2, 3, 1)

        return run

    def made(kind, ins, attrs):
        """The step as a function, and the names of what it takes."""
        if kind in ("conv2d", "depthwise_conv2d"):
            return conv(None, *(held[each] for each in ins[1:]), attrs=attrs), ins[:1]
        if kind == "fully_connected":
            return lambda x, *rest: F.linear(x, *rest), ins
        if kind == "max_pooling2d":
            return pool(attrs), ins
        if kind == "global_average_pooling2d":
            return lambda x: x.mean((1, 2)).reshape(attrs["shape"]), ins
        if kind == "static_reshape":
            return lambda x: x.reshape(attrs["shape"]), ins
        if kind == "static_transpose":
            return lambda x: x.permute(attrs["perm"]), ins
        if kind == "scaled_dot_product_attention":
            return lambda q, k, v, s, m: F.scaled_dot_product_attention(q * s, k, v, attn_mask=m, scale=1.0), ins
        if kind == "gelu":
            return F.gelu, ins
        if kind in UNARY:
            return (lambda x: x) if kind == "clamp" else getattr(torch, UNARY[kind]), ins
        return getattr(torch, BINARY[kind]), ins

    ready, views = [], set()
    for kind, ins, out, attrs, limits in steps:
        function, takes = made(kind, ins, attrs)
        ready.append((function, takes, out, limits))
        if kind in ("clamp", "static_reshape", "static_transpose", "global_average_pooling2d"):
            views.add(function)

    def run(arrays):
        with torch.inference_mode():
            values = dict(held)
            left = dict(used)
            values.update(zip(inputs, map(torch.from_numpy, arrays)))
            for function, takes, out, limits in ready:
                result = function(*[values[name] for name in takes])
                if limits is not None:
                    # Layers have made memory of their own.
                    result = result.clamp_(*limits) if function not in views else result.clamp(*limits)
                values[out] = result
                for name in takes:
                    left[name] -= 1
                    if not left[name] and name not in outputs and name not in held:
                        del values[name]
            return [values[name].contiguous().numpy() for name in outputs]

    return run

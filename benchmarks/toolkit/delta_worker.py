"""The gated delta rule by ONNX Runtime, for `delta.py`, in an environment of its own: onnx, onnxruntime and numpy, no tarnn.

    python benchmarks/toolkit/delta_worker.py '{"length": 2048, "heads": 16, "head_dim": 128}' INPUTS.npz OUTPUTS.npy

It writes what it computes, says its version, and then, for each line that it reads, makes as many calls as that says and answers
with the seconds per call: so both processes take turns. One thread; results are written into memory that stays.
"""

import json
import sys
import time

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

NAMES = ("query", "key", "value", "past_state", "decay", "beta")


def main():
    shape, inputs = json.loads(sys.argv[1]), np.load(sys.argv[2])
    session = session_of(shape)
    binding, outputs = session.io_binding(), {}
    for name in NAMES:
        binding.bind_cpu_input(name, inputs[name])
    for name, like in (("output", "value"), ("present_state", "past_state")):
        outputs[name] = onnxruntime.OrtValue.ortvalue_from_shape_and_type(inputs[like].shape, np.float32)
        binding.bind_ortvalue_output(name, outputs[name])
    session.run_with_iobinding(binding)
    np.save(sys.argv[3], outputs["output"].numpy())
    print(json.dumps({"version": onnxruntime.__version__}), flush=True)
    for line in sys.stdin:
        begun = time.perf_counter()
        for _ in range(int(line)):
            session.run_with_iobinding(binding)
        print((time.perf_counter() - begun) / int(line), flush=True)


def session_of(shape):
    """A session whose model is the one node."""
    t, h, d = shape["length"], shape["heads"], shape["head_dim"]
    sizes = {"past_state": [1, h, d, d], "present_state": [1, h, d, d], "decay": [1, t, h], "beta": [1, t, h]}
    value = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes.get(name, [1, t, h * d]))  # noqa: E731
    outputs = ("output", "present_state")
    how = {"q_num_heads": h, "kv_num_heads": h, "update_rule": "gated_delta", "domain": "com.microsoft"}
    node = helper.make_node("LinearAttention", NAMES, outputs, **how)
    graph = helper.make_graph([node], "delta", [value(x) for x in NAMES], [value(x) for x in outputs])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


if __name__ == "__main__":
    main()

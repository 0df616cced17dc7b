"""One decoder of `decode_baselines.py`, in an environment of its own that has the package and numpy, and no tarnn.

    python benchmarks/toolkit/decode_workers.py '{"engine": "onnxruntime", "weights": "int4", …}'   → milliseconds, JSON
    python benchmarks/toolkit/decode_workers.py @FILE.json      # the same, from a file; the engine "gguf" only writes a model

A model of Llama's shape with random weights is written in the engine's own format, and run for one token at a time, on one
thread, behind so many positions.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

LLAMA_TYPES = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
BITS = {"int8": 8, "int4": 4}
GROUP = 32


def main() -> None:
    word = sys.argv[1]
    given = json.loads(Path(word[1:]).read_text() if word.startswith("@") else word)
    if given["engine"] == "gguf":
        return write_gguf(given, given["file"])
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(ENGINES[given["engine"]](given, Path(folder))))


def matrices(shape):
    """Name and (outputs, inputs) of a layer's matrices."""
    hidden, inner = shape["hidden"], shape["inner"]
    keys = shape["kv_heads"] * (hidden // shape["heads"])
    return {
        "attn_q": (hidden, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, hidden),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }


def random(rng, size):
    return (rng.standard_normal(size, dtype=np.float32) * 0.02).astype(np.float32)


def timed(step, tokens):
    """Milliseconds per token: the median of so many."""
    times = []
    for _ in range(tokens):
        begun = time.perf_counter()
        step()
        times.append(1000 * (time.perf_counter() - begun))
    return statistics.median(times)


# --- llama.cpp


def llama(given, folder):
    import llama_cpp

    file = folder / "model.gguf"
    write_gguf(given, file)
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
    found = {}
    for position in given["positions"]:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = position + 2 * given["tokens"] + 64, 1, 1
        context = llama_cpp.llama_init_from_model(model, params)

        def decode(n, context=context):
            ids = (llama_cpp.llama_token * n)(*[7] * n)
            if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(ids, n)):
                raise RuntimeError("llama_decode failed")

        for begin in range(0, position, 512):
            decode(min(512, position - begin))
        for _ in range(3):
            decode(1)
        found[position] = timed(lambda decode=decode: decode(1), given["tokens"])
        llama_cpp.llama_free(context)
    return {"version": llama_cpp.__version__, "ms": found}


def write_gguf(given, file):
    import gguf

    shape, rng = given["shape"], np.random.default_rng(0)
    kind = gguf.GGMLQuantizationType[LLAMA_TYPES[given["weights"]]]
    head = kind if given["weights"] == "float32" else gguf.GGMLQuantizationType.BF16
    out = gguf.GGUFWriter(str(file), "llama")
    out.add_context_length(1 << 17)
    out.add_embedding_length(shape["hidden"])
    out.add_block_count(shape["layers"])
    out.add_feed_forward_length(shape["inner"])
    out.add_head_count(shape["heads"])
    out.add_head_count_kv(shape["kv_heads"])
    out.add_rope_dimension_count(shape["hidden"] // shape["heads"])
    out.add_layer_norm_rms_eps(1e-6)
    out.add_vocab_size(shape["vocab"])
    words = given.get("vocabulary")
    if words is None:
        out.add_tokenizer_model("no_vocab")
    else:
        add_vocabulary(out, words)

    def put(name, x, kind):
        if kind == gguf.GGMLQuantizationType.F32:
            out.add_tensor(name, x)
        else:
            out.add_tensor(name, gguf.quants.quantize(x, kind), raw_dtype=kind)

    ones = np.ones(shape["hidden"], np.float32)
    put("token_embd.weight", random(rng, (shape["vocab"], shape["hidden"])), gguf.GGMLQuantizationType.F32)
    put("output.weight", random(rng, (shape["vocab"], shape["hidden"])), head)
    out.add_tensor("output_norm.weight", ones)
    for layer in range(shape["layers"]):
        for name, size in matrices(shape).items():
            put(f"blk.{layer}.{name}.weight", random(rng, size), kind)
        for name in ("attn_norm", "ffn_norm"):
            out.add_tensor(f"blk.{layer}.{name}.weight", ones)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()


def add_vocabulary(out, words):
    """A byte-level BPE, as `served_models.vocabulary` describes it; the last of its special tokens ends a text."""
    import gguf

    kinds = [gguf.TokenType.CONTROL if special else gguf.TokenType.NORMAL for special in words["special"]]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list(words["tokens"])
    out.add_token_types(kinds)
    out.add_token_merges(words["merges"])
    end = max(i for i, special in enumerate(words["special"]) if special)
    out.add_eos_token_id(end)
    out.add_bos_token_id(end)
    out.add_add_bos_token(False)
    out.close()


# --- ONNX Runtime


class Graph:
    """A step of the model, node by node."""

    def __init__(self, given):
        from onnx import helper, numpy_helper

        self.helper, self.numpy_helper = helper, numpy_helper
        self.weights, self.rng = given["weights"], np.random.default_rng(0)
        self.nodes, self.constants, self.count = [], [], 0

    def constant(self, x):
        self.count += 1
        self.constants.append(self.numpy_helper.from_array(x, f"c{self.count}"))
        return f"c{self.count}"

    def node(self, kind, inputs, outputs=1, **options):
        self.count += 1
        names = [f"n{self.count}_{i}" for i in range(outputs)]
        self.nodes.append(self.helper.make_node(kind, inputs, names, **options))
        return names[0] if outputs == 1 else names

    def product(self, x, size):
        outputs, inputs = size
        if self.weights == "float32":
            return self.node("MatMul", [x, self.constant(random(self.rng, (inputs, outputs)))])
        bits, groups = BITS[self.weights], -(-inputs // GROUP)
        packed = self.rng.integers(0, 256, (outputs, groups, GROUP * bits // 8), dtype=np.uint8)
        scales = np.full(outputs * groups, 0.02 / 2 ** (bits - 2), np.float32)
        return self.node(
            "MatMulNBits",
            [x, self.constant(packed), self.constant(scales)],
            domain="com.microsoft",
            K=inputs,
            N=outputs,
            bits=bits,
            block_size=GROUP,
            accuracy_level=4,
        )

    def norm(self, x, hidden):
        return self.node(
            "SimplifiedLayerNormalization", [x, self.constant(np.ones(hidden, np.float32))], epsilon=1e-6, axis=-1
        )


def onnx_model(given, capacity):
    from onnx import TensorProto, helper

    graph, shape = Graph(given), given["shape"]
    hidden, heads, kv, d = (shape["hidden"], shape["heads"], shape["kv_heads"], shape["hidden"] // shape["heads"])
    angles = np.arange(capacity)[:, None] * 10000.0 ** (-np.arange(d // 2) * 2 / d)
    cos, sin = (graph.constant(f(angles).astype(np.float32)) for f in (np.cos, np.sin))
    x = graph.node("Gather", [graph.constant(random(graph.rng, (shape["vocab"], hidden))), "ids"])
    values = [helper.make_tensor_value_info("ids", TensorProto.INT64, [1, 1])]
    values += [helper.make_tensor_value_info(n, TensorProto.INT32, s) for n, s in (("lengths", [1]), ("total", []))]
    results = []
    for layer in range(shape["layers"]):
        sizes = matrices(shape)
        y = graph.norm(x, hidden)
        qkv = [graph.product(y, sizes[f"attn_{n}"]) for n in "qkv"]
        past = [f"past_{n}{layer}" for n in "kv"]
        values += [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, kv, capacity, d]) for n in past]
        o, *present = graph.node(
            "GroupQueryAttention",
            [*qkv, *past, "lengths", "total", cos, sin],
            3,
            domain="com.microsoft",
            num_heads=heads,
            kv_num_heads=kv,
            do_rotary=1,
        )
        results += [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, kv, capacity, d]) for n in present]
        x = graph.node("Add", [x, graph.product(o, sizes["attn_output"])])
        y = graph.norm(x, hidden)
        gate, up = (graph.product(y, sizes[f"ffn_{n}"]) for n in ("gate", "up"))
        inner = graph.node("Mul", [graph.node("Mul", [gate, graph.node("Sigmoid", [gate])]), up])
        x = graph.node("Add", [x, graph.product(inner, sizes["ffn_down"])])
    logits = graph.product(graph.norm(x, hidden), (shape["vocab"], hidden))
    results = [helper.make_tensor_value_info(logits, TensorProto.FLOAT, [1, 1, shape["vocab"]]), *results]
    made = helper.make_graph(graph.nodes, "step", values, results, graph.constants)
    sets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(made, opset_imports=sets, ir_version=10)


def onnxruntime(given, folder):
    import onnx
    import onnxruntime as ort

    capacity = max(given["positions"]) + 64
    file = folder / "model.onnx"
    onnx.save(onnx_model(given, capacity), file)
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    caches = [x for x in session.get_inputs() if x.name.startswith("past")]
    buffers = [
        ort.OrtValue.ortvalue_from_numpy(np.random.default_rng(1).standard_normal(x.shape, dtype=np.float32))
        for x in caches
    ]
    found = {}
    for position in given["positions"]:
        binding = session.io_binding()
        binding.bind_cpu_input("ids", np.array([[7]]))
        binding.bind_cpu_input("lengths", np.array([position], np.int32))
        binding.bind_cpu_input("total", np.array(position + 1, np.int32))
        names = [x.name for x in session.get_outputs()]
        binding.bind_output(names[0])
        for x, name, buffer in zip(caches, names[1:], buffers, strict=True):
            binding.bind_ortvalue_input(x.name, buffer)
            binding.bind_ortvalue_output(name, buffer)
        run = lambda binding=binding: session.run_with_iobinding(binding)  # noqa: E731
        timed(run, 3)
        found[position] = timed(run, given["tokens"])
    return {"version": ort.__version__, "ms": found}


ENGINES = {"llama.cpp": llama, "onnxruntime": onnxruntime}

if __name__ == "__main__":
    main()

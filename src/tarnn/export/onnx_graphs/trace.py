"""A program as an ONNX graph: one function per kind of instruction, and the reasons for those that have none."""

from collections.abc import Callable, Iterator

from onnx import TensorProto

from tarnn.export.onnx_graphs import row_wise
from tarnn.export.onnx_graphs.features import features
from tarnn.export.onnx_graphs.graph import Graph, Port, WeightFile
from tarnn.export.onnx_graphs.recurrent import RECURRENT
from tarnn.export.onnx_graphs.registers import BATCH, Tracing
from tarnn.program.instructions import Instruction, Program

NODES: dict[str, Callable[[Tracing, Instruction], tuple[str, ...]]] = {
    **{
        f.__name__: f
        for f in (
            row_wise.embed, row_wise.product, row_wise.head, row_wise.concat, row_wise.head_product, row_wise.add,
            row_wise.mul, row_wise.norm, row_wise.apply, row_wise.clamp, row_wise.rotate, features,
        )
    },
    **RECURRENT,
}  # fmt: skip
MAXIMUM = (
    "features of exponentials, or of centred and balanced vectors, whose sums have a running maximum; the state of ONNX's "
    "LinearAttention has none, and float32 would overflow"
)
LACKING = {  # kind: what the model has there, and why it can't be
    "hybrid": "softmax over a window of tokens, for which ONNX has no state that drops them",
    "low_rank_delta": "RWKV-7's recurrence, which erases along another vector than it writes: LinearAttention has one key",
    "selective_scan": "a selective scan (Mamba), for which ONNX has no operator",
    "diagonal_scan": "a scan of channels, for which ONNX has no operator",
    "experts": "experts, of which each token chooses some",
    "route": "experts, of which each token chooses some",
    "mix": "RWKV's mixture with the token before",
}


def lacking(program: Program) -> Iterator[str]:
    """Return what the program has that no ONNX graph of ours computes."""
    for x in program.instructions:
        if x.kind == "embed" and x.numbers.get("extra") and not x.numbers.get("sinusoidal"):
            yield "rows that each call adds to the embeddings (classes)"
        elif x.kind == "linear" and x.numbers.get("at_least_one"):
            yield "the denominator of an mLSTM, which is kept in units of a running maximum"
        elif x.kind == "linear" and ("k_scale" in x.numbers or "q_scale" in x.numbers):
            yield MAXIMUM
        elif x.kind not in NODES:
            yield LACKING.get(x.kind, f"the instruction {x.kind}")


def trace(program: Program, weights: WeightFile, *, one_token: bool, standard: bool) -> Graph:
    """Return the graph of any number of tokens, or of one: input_ids and states → logits of the last token, states."""
    graph = Graph(weights, standard=standard)
    tracing = Tracing(program, graph, one_token)
    assert tracing.ids == "input_ids"  # the first input
    graph.outputs.append(Port("logits", TensorProto.FLOAT, (BATCH, 1, program.num_outputs)))
    for x in program.instructions:
        tracing.write(x, *NODES[x.kind](tracing, x))
    return graph

"""Graphs for other runtimes: torch.onnx.export and torch.jit.trace meet plain operations, not tarnn's operators."""

import warnings

import pytest
import torch

from tarnn import (
    Elu,
    LinearAttention,
    LinearState,
    PositiveRandomFeatures,
    delta_rule,
    diagonal_scan,
    hybrid_attention,
    linear_attention,
    selective_scan,
    short_convolution,
    softmax_attention,
    step,
)


class Function(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *given):
        return self.function(*given)


PHI = PositiveRandomFeatures(4, 6, seed=0)


def one_step(q, k, v):
    q, k, v = (x[:, :, :1] for x in (q, k, v))
    zeros = torch.zeros(1, 2, 4, device=q.device)
    return step(q, k, v, Elu(), LinearState(zeros[..., None].expand(1, 2, 4, 5), zeros))[0]


OPS = {
    "linear": lambda q, k, v: linear_attention(q, k, v, Elu(), causal=True),
    "to both sides": lambda q, k, v: linear_attention(q, k, v, Elu(), causal=False),
    "FAVOR+": lambda q, k, v: linear_attention(q, k, v, PHI.to(q.device), causal=True),
    "a decay": lambda q, k, v: linear_attention(q, k, v, Elu(), causal=True, log_decay=-k[..., 0].abs()),
    "softmax": lambda q, k, v: softmax_attention(q, k, v, causal=True),
    "hybrid": lambda q, k, v: hybrid_attention(q, k, v, Elu(), window=3, causal=True),
    "step": one_step,
    "convolution": lambda q, k, v: short_convolution(q[:, 0], k[0, 0, :4, :3]),
    "diagonal scan": lambda q, k, v: diagonal_scan(q[:, 0], -k[:, 0].abs()),
    "selective scan": lambda q, k, v: selective_scan(
        q[:, 0], k[:, 0].abs(), -v[0, 0, :4].abs(), v[:, 1], v[:, 0]
    ),
}  # fmt: skip


def drawn(device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(1, 2, 20, n, generator=generator, device="cpu").to(device) for n in (4, 4, 5))


@pytest.mark.parametrize("name", OPS)
def test_an_exporter_to_onnx_meets_no_operator_of_ours(name, device, monkeypatch):
    given, module = drawn(device), Function(OPS[name])
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    program = torch.export.export(module, given)
    assert not [node for node in program.graph.nodes if "tarnn" in str(node.target)]
    torch.testing.assert_close(program.module()(*drawn(device, 1)), module(*drawn(device, 1)))


@pytest.mark.parametrize("name", ["linear", "a decay", "step", "convolution", "diagonal scan", "selective scan"])
def test_a_trace_computes_and_repeats_nothing(name, device):
    module = Function(OPS[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(module, drawn(device), check_trace=False)
    torch.testing.assert_close(traced(*drawn(device, 1)), module(*drawn(device, 1)))


@pytest.mark.one_path
@pytest.mark.filterwarnings("ignore")
def test_a_runtime_of_onnx_computes_the_same(tmp_path):
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    layer = LinearAttention(hidden_size=16, num_heads=2, feature_map=Elu(), causal=True).eval()
    x = torch.randn(1, 20, 16)
    torch.onnx.export(layer, (x,), tmp_path / "layer.onnx")
    session = runtime.InferenceSession(tmp_path / "layer.onnx", providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(found), layer(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(Exception, match="linalg_solve_triangular"):  # which ONNX has no function for
        torch.onnx.export(Function(lambda q: delta_rule(q, q, q, q[..., 0].sigmoid())), (torch.randn(1, 2, 20, 4),))

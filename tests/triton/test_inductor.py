"""The code that torch.compile makes for a GPU, made without one: tensors are fake, and Inductor is told of an H100.

Autograd does not take CUDA tensors where torch was built without CUDA, so a training step is traced on `meta` first.
"""

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch._inductor import config
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from tarnn.models import TarnnConfig, TarnnForCausalLM

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.compile,
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, what is made up here is real"),
]
H100 = SimpleNamespace(
    type="cuda",
    index=0,
    name="H100",
    gcnArchName="",
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    total_memory=80 << 30,
    max_threads_per_block=1024,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10,
    L2_cache_size=50 << 20,
)
ALONE = "TARNN_TEST_ALONE"
INTERFACE = "torch._dynamo.device_interface.CudaInterface"
PRETENDED = {  # what Inductor asks of a GPU, and what it would run on one
    "torch.cuda.is_available": lambda: True,
    "torch.cuda.current_device": lambda: 0,
    "torch.cuda.device_count": lambda: 1,
    "torch.cuda.get_device_properties": lambda *_: H100,
    "torch.cuda.get_device_capability": lambda *_: (9, 0),
    "torch.cuda.get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
    "torch.cuda.set_rng_state": lambda *_: None,
    "torch.cuda.set_device": lambda *_: None,
    "torch.cuda.synchronize": lambda *_: None,
    "torch.cuda._exchange_device": lambda _: 0,
    "torch.cuda._maybe_exchange_device": lambda _: 0,
    f"{INTERFACE}.is_available": lambda: True,
    f"{INTERFACE}.get_device_properties": lambda *_: H100,
    f"{INTERFACE}.get_compute_capability": lambda *_: 90,
    f"{INTERFACE}.Worker.get_device_properties": lambda *_: H100,
    f"{INTERFACE}.Worker.current_device": lambda: 0,
    "torch._inductor.fx_passes.joint_graph.lazy_init": lambda *_: None,
    "torch._inductor.fx_passes.post_grad.lazy_init": lambda *_: None,
    "torch.utils._triton.triton_hash_with_backend": lambda: "",
}
NOTHING_IS_RUN = {"force_disable_caches": True, "compile_threads": 1, "joint_graph_constant_folding": False}


def code_for(function, inputs, options) -> str:
    """What Inductor writes for `function` of fake CUDA tensors like these; one graph, or an error."""
    found = []

    def keep(graph):
        code, *_ = graph.codegen()
        found.append(code.value)
        raise SystemExit  # there is nothing to run it on

    with ExitStack() as stack:
        for name, value in PRETENDED.items():
            stack.enter_context(mock.patch(name, value))
        stack.enter_context(mock.patch("torch._inductor.graph.GraphLowering.compile_to_module", keep))
        stack.enter_context(config.patch(NOTHING_IS_RUN | options))
        stack.enter_context(FakeTensorMode())
        given = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") for x in inputs]
        with torch.no_grad(), pytest.raises(SystemExit):
            torch.compile(function, fullgraph=True)(*given)
    return found[0]


@pytest.fixture(scope="module")
def training_step():
    """A function of a model's parameters and tokens to its gradients, as operations on tensors, and these inputs.

    But for the embedding's gradient, for which Inductor asks a real GPU.
    """
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
    with torch.device("meta"):
        model = TarnnForCausalLM(TarnnConfig(**sizes, tie_word_embeddings=False))
        ids = torch.ones(2, 9, dtype=torch.long)
    names, values = zip(*model.named_parameters())

    def gradients(*given):
        *weights, ids = given
        loss = functional_call(model, dict(zip(names, weights)), (ids,), {"labels": ids}).loss
        return torch.autograd.grad(loss, weights[1:])

    inputs = [*(x.detach().requires_grad_() for x in values), ids]
    return make_fx(gradients)(*inputs), inputs


def attention_in(code: str) -> list[str]:
    """The calls of our operators, by their names without the digest."""
    return re.findall(r"= torch\.ops\.tarnn\.(\w+)_[0-9a-f]{8}\.default\(", code)


@pytest.mark.skipif(ALONE not in os.environ, reason="run by the next test, in a process of its own")
def test_a_training_step_is_one_graph_around_our_operators(training_step):
    """CUDA graphs leave them out: their first call puts tables on the GPU and keeps them, which the memory of a graph must not
    hold; and cu_seqlens are read."""
    code = code_for(*training_step, {"triton.cudagraphs": True, "graph_partition": True})
    assert "async_compile.triton(" in code
    recorded, rest = code[code.index("def partition_0(") :].split("def call(")
    assert attention_in(recorded) == []
    assert attention_in(rest) == ["linear_attention", "linear_attention_backward"]
    for body in (recorded, rest[: rest.index("runner = Runner(")]):
        assert "cpu" not in body  # nothing is made elsewhere, or waited for
        assert ".item()" not in body


@pytest.mark.slow
def test_the_above_where_nobody_has_asked_for_a_gpu_before():
    """torch keeps what it once found of GPUs in many places, so the pretence takes a new process."""
    alone = ["-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", __file__, "-k", "one_graph"]
    run = subprocess.run([sys.executable, *alone], env={**os.environ, ALONE: "1"}, capture_output=True, text=True)
    assert "1 passed" in run.stdout, run.stdout + run.stderr

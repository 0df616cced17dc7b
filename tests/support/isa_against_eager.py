"""Prints the instruction set in use, or fails where the compiled kernels and plain PyTorch differ.

`test_isa.py` runs it once for each TARNN_ISA that the processor has.
"""

import torch
from fuzz import errors, set_up

from support.draw_calls import alike as draws_alike
from support.drawn_calls import OPS, excess
from support.fuzz_calls import Call
from support.kernel_calls import DTYPES, MODES, drawn
from support.rounded_model import share_alike
from tarnn.decoding.fused import FusedStep
from tarnn.kernels.cpu import library
from tarnn.models import TarnnConfig, TarnnForCausalLM

# a wrong lane is wrong by all of its size
LIMITS = {"float64": 1e-12, "float32": 1e-4, "bfloat16": 0.05, "float16": 0.01}

torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN
torch.set_num_threads(1)
for mode in MODES:
    for dtype, limit in [(dtype, LIMITS[dtype]) for dtype in DTYPES]:
        for size in ({"d": 16, "e": 64, "t": 64, "s": 64}, {"d": 7, "e": 37}, {"d": 35, "e": 5, "tiny_chunks": True}):
            call = drawn(mode, dtype=dtype, options_narrow=True, spread=0.5, b=1, g=1, **size)
            with set_up(call):
                compiled = Call(call).ours()
                with library.disabled():
                    plain = Call(call).ours()
            found = errors(compiled, [x.detach().double() for x in plain])
            assert max(found.values()) <= limit, (call, found)
for op in OPS:
    assert [(op, number) for number in range(50) if excess(op, number) > 1] == []
assert all(draws_alike(seed) for seed in range(20))
config = TarnnConfig(hidden_size=40, num_hidden_layers=1, num_attention_heads=5, initializer_range=0.2)
model = TarnnForCausalLM(config).eval()
for weights in ("int8", "int4"):
    assert all(share_alike(model, FusedStep(model, weights), batch)[0] > 0.6 for batch in (1, 4, 30))
for weights, limit in {"float32": 1e-5, "bfloat16": 0.02}.items():
    step, ours, theirs = FusedStep(model, weights), model.new_state(13), model.new_state(13)
    for token in torch.randint(0, 257, (3, 13)):
        (got, ours), (expected, theirs) = step(token, ours), model.step(token, theirs)
    assert (got - expected).abs().max() < limit * expected.abs().max()
print(library.status().path)

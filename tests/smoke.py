"""Does an installed wheel attend with its compiled kernels, as the definition says? No test framework needed.

python tests/smoke.py
"""

import torch

import tarnn
from tarnn.kernels.cpu import library
from tarnn.ops import reference

q, k, v = (torch.randn(2, 3, 70, 8).double() for _ in range(3))
o = tarnn.linear_attention(q, k, v, tarnn.Elu(), causal=True)
error = (o - reference.quadratic(tarnn.Elu()(q), tarnn.Elu()(k), v, causal=True)).abs().max().item()
path, why = library.status()
print(f"tarnn {tarnn.__version__}, torch {torch.__version__}: {path} ({why}), error {error:.1e}")
assert library.available()
assert error < 1e-12

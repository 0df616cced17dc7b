"""The methods that `attention.py` compares: functions (q, k, v, causal) → o of (b, h, t, d) tensors.

All but SDPA compute the same: linear attention with elu(x) + 1 features and its normaliser. fast-transformers and
performer-pytorch take part where they are installed; nothing here needs them.
"""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.functional import elu, pad, scaled_dot_product_attention

from scripts.common.provenance import kernels
from tarnn import Elu, linear_attention
from tarnn.kernels.cpu import library

Attend = Callable[..., Tensor]  # (q, k, v, causal) → o
PHI = Elu()
EXPERT, COMPILED = "specialised, fast products", "specialised, compiled"


@dataclass(frozen=True)
class Method:
    name: str
    attend: Attend  # (*given(q, k, v), causal) → o
    power: int = 1  # its time grows as t^power
    ours: bool = False  # wrong results of ours stop the benchmark, those of others leave them out
    patience: float = 2.0  # seconds a call beyond which one call must do
    surroundings: Callable[[], AbstractContextManager] = nullcontext
    release: Callable[[], object] = lambda: None  # gives back what it keeps between calls
    dtypes: tuple[str, ...] | None = None  # in which it differs from others; None: all
    # made before the clock starts; gradients are of the first three
    given: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]] = lambda *qkv: qkv


def tarnn_attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return linear_attention(q, k, v, PHI, causal=causal)


def specialised(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The same in plain PyTorch as one would write it for this case alone: no options, a state stored for each chunk,
    the normaliser as one more column of v, autograd's backward. Chunks of d positions, which was fastest at each d."""
    (b, h, t, d), e = q.shape, v.shape[3]
    v = torch.cat([v, v.new_ones(b, h, t, 1)], dim=-1)
    q, k = elu(q) + 1, elu(k) + 1
    if not causal:
        o = q @ (k.mT @ v)
        return o[..., :e] / o[..., e:]
    n = -(-t // d)
    q, k, v = (pad(x, (0, 0, 0, n * d - t)).reshape(b * h * n, d, -1) for x in (q, k, v))
    S = torch.bmm(k.mT, v).view(b * h, n, -1)
    S = (S.cumsum(1) - S).view(b * h * n, d, e + 1)
    o = torch.baddbmm(torch.bmm(torch.bmm(q, k.mT).tril(), v), q, S).view(b, h, n * d, e + 1)[:, :, :t]
    return o[..., :e] / o[..., e:]


@contextmanager
def fast_products() -> Iterator[None]:
    """Within: torch hands float32 products to oneDNN, as an expert would have it where that is faster than MKL."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def compiled() -> Attend:
    """The same by `torch.compile`, anew for each shape, as one would have it where lengths are the same at every step."""
    attend, shapes = torch.compile(specialised, dynamic=False), set[tuple[int, ...]]()

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        if q.shape not in shapes:  # else it would end at torch's limit of eight
            torch.compiler.reset()
            shapes.clear()
            shapes.add(q.shape)
        return attend(q, k, v, causal)

    return call


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=causal)


def fast_transformers() -> Attend:
    """The first paper's code: layout (b, t, h, d), float32 only."""
    from fast_transformers.attention import CausalLinearAttention, LinearAttention

    kinds: dict[tuple[bool, int], torch.nn.Module] = {}

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        kind = (causal, q.shape[-1])
        if kind not in kinds:
            kinds[kind] = (CausalLinearAttention if causal else LinearAttention)(q.shape[-1])
        # stands for masks that hide nothing; theirs would hold t² of it
        mask = SimpleNamespace(lower_triangular=causal, all_ones=not causal)
        lengths = SimpleNamespace(float_matrix=q.new_ones(q.shape[0], q.shape[2]))
        return kinds[kind](*(x.transpose(1, 2) for x in (q, k, v)), mask, lengths, lengths).transpose(1, 2)

    return attend


def performer() -> Attend:
    """performer-pytorch's products, on the same features."""
    from performer_pytorch import performer_pytorch as theirs

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        f = theirs.causal_linear_attention_noncuda if causal else theirs.linear_attention
        return f(elu(q) + 1, elu(k) + 1, v)

    return attend


OPTIONAL = {
    "fast-transformers": ("fast_transformers", fast_transformers),
    "performer": ("performer_pytorch", performer),
}


def release_scratch() -> None:
    """Each thread's scratch, which the kernels keep from call to call up to 1 MiB: after a call that needs more it is freed."""
    x = torch.ones(1, 8 * torch.get_num_threads(), 64, 512)
    tarnn_attend(x, x, x, True)


def available(device: str = "cpu") -> tuple[list[Method], dict[str, str]]:
    """(the methods that can run here, why the others can't)."""
    methods, absent = [], {}
    if library.available() and device == "cpu":
        methods.append(Method("native", tarnn_attend, ours=True, release=release_scratch))
    else:
        absent["native"] = kernels() if device == "cpu" else f"the native kernels are for CPUs; this is {device}"
    methods.append(Method("chunked", tarnn_attend, ours=True, surroundings=library.disabled))
    methods.append(Method("specialised", specialised))
    if device == "cpu":
        methods.append(Method(EXPERT, specialised, surroundings=fast_products, dtypes=("float32",)))
        methods.append(Method(COMPILED, compiled(), surroundings=fast_products, dtypes=("float32",)))
    methods.append(Method("sdpa", sdpa, power=2, patience=1.0))
    for name, (module, build) in OPTIONAL.items():
        if importlib.util.find_spec(module) is None:
            absent[name] = "not installed"
            continue
        try:
            methods.append(Method(name, build()))
        except Exception as error:  # built for another torch, say: that is its affair
            absent[name] = f"does not import: {type(error).__name__}: {error}"
    return methods, absent

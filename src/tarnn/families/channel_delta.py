"""Kimi's delta attention (Kimi Team 2025, arXiv 2510.26692): the gated delta rule with a decay for each channel of a key.

q, k, v = silu(filters of W x), q and k of length 1     β = σ(W_b x)     a = W_f x + bias
g = −e^A softplus(a), or, with a least log-decay, least · σ(e^A a)
S ← Diag(e^g) S, then S ← S + β k (v − kᵀS)ᵀ            y = norm(Sᵀq / √d) ⊙ σ(W_g x)
"""

from dataclasses import dataclass

from tarnn.families.gated_delta import DeltaSizes, filters
from tarnn.families.parts import dense, rms, split_heads
from tarnn.families.weights import Weights
from tarnn.program.recording import Register, apply, delta, filter, heads, norm, product, products


@dataclass(frozen=True)
class ChannelDelta:
    """heads of `width` channels; taps: width of the filters; least: the least log-decay, None: any; eps: of the last norm.

    pairs: W_f and W_g are products of two matrices of rank `width`.
    """

    heads: int
    width: int
    taps: int
    eps: float
    least: float | None = None
    pairs: bool = False

    def mix(self, x: Register, w: Weights) -> Register:
        """Mix tokens, (heads, width) per token."""
        n, d, state = self.heads, self.width, x.record.state("GatedDeltaState")
        qkv = products(x, *(w.get(f"{name}_proj.weight", (n * d, x.size)) for name in "qkv"))
        taps = filters(w, DeltaSizes(n, n, d, d, self.taps))
        q, k, v = split_heads(filter(qkv, taps, state), (n, d), (n, d), (n, d))
        q, k = norm(q, eps=1e-6, kind="l2") * d**-0.5, norm(k, eps=1e-6, kind="l2")
        beta = heads(apply(dense(x, w, "b_proj", n, exact=True), "sigmoid"), n)
        o = delta(q, k, v, beta, state, log_decay=self.log_decay(x, w))
        gate = dense(dense(x, w, "g_a_proj", d), w, "g_b_proj", n * d) if self.pairs else dense(x, w, "g_proj", n * d)
        return rms(o, w, "o_norm", self.eps) * heads(apply(gate, "sigmoid"), n)

    def log_decay(self, x: Register, w: Weights) -> Register:
        """Record the logarithm of each channel's decay, (heads, width) per token."""
        n, d = self.heads, self.width
        w = w.under("forget_gate.") if "forget_gate.A_log" in w else w  # of a live model
        if self.pairs:
            x = dense(x, w, "f_a_proj", d, exact=True)
        name = "f_b_proj" if self.pairs else "f_proj"
        a = heads(product(x, w.get(f"{name}.weight", (n * d, x.size)), w.get("dt_bias", (n * d,)), exact=True), n)
        shape = (1, 1, n, 1) if self.pairs else (n,)
        rate = w.get("A_log", shape).double().exp().float().view(n, 1)
        if self.least is None:
            return apply(a, "softplus") * -rate
        return apply(a * rate, "sigmoid") * self.least

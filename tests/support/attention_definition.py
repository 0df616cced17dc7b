"""What each attention module computes, written from its formula with the quadratic definitions."""

import torch

from tarnn.attention import (
    GatedDeltaAttention,
    LinearAttention,
    Mamba2Attention,
    NoAttention,
    Rwkv7Attention,
    SoftmaxAttention,
    WindowAttention,
)
from tarnn.feature_maps.base import PositionalMap
from tarnn.ops.hybrid import definition as hybrid_definition
from tarnn.ops.linear import definition as linear_definition
from tarnn.ops.softmax import definition as softmax_definition


def heads(x, num_heads):
    b, t, _ = x.shape
    return x.reshape(b, t, num_heads, -1).permute(0, 2, 1, 3)


def turned(x, rotary):
    """Pairs of channels (c, c + dim/2) as complex numbers, times e^(i·position·frequency)."""
    half = rotary.dim // 2
    frequency = rotary.base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * frequency
    z = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], dim=-1).to(x.dtype)


def define(module, x, context=None, key_mask=None):
    """module(x, context, key_mask=key_mask), in the dtype of x, by the quadratic definitions."""
    if (recurrence := RECURRENCES.get(type(module))) is not None:
        rows = zip(x, [None] * len(x) if key_mask is None else key_mask)
        return torch.stack([recurrence(module, row, real) for row, real in rows])
    source = x if context is None else context
    v = heads(module.v_proj(source), module.num_kv_heads)
    if isinstance(module, NoAttention):
        o = v.repeat_interleave(module.num_heads // module.num_kv_heads, dim=1)
        o = o if key_mask is None else o * key_mask[:, None, :, None]
    else:
        q, k = heads(module.q_proj(x), module.num_heads), heads(module.k_proj(source), module.num_kv_heads)
        if module.q_norm is not None:
            q, k = (u / (u.square().mean(-1, keepdim=True) + 1e-6).sqrt() for u in (q, k))
            q, k = q * module.q_norm.weight, k * module.k_norm.weight
        if isinstance(module, SoftmaxAttention | WindowAttention) and module.rotary is not None:
            q, k = turned(q, module.rotary), turned(k, module.rotary)
        if isinstance(module, SoftmaxAttention):
            o = softmax_definition.softmax(q, k, v, causal=module.causal, key_mask=key_mask)
        elif isinstance(module, WindowAttention):
            o = _window(module, q, k, v, key_mask)
        else:
            o = _linear(module, x, q, k, v, key_mask)
    return module.o_proj(o.permute(0, 2, 1, 3).reshape(*x.shape[:2], -1))


def _window(module: WindowAttention, q, k, v, key_mask):
    options = {"causal": module.causal, "window": module.window, "sinks": module.sinks, "scale": q.shape[3] ** -0.5}
    return hybrid_definition.hybrid(q, k, v, None, key_mask=key_mask, **options)[0]


def _linear(module: LinearAttention, x, q, k, v, key_mask):
    rotary = module.rotary
    if rotary is not None and getattr(module.feature_map, "dot_product", False):
        q, k, rotary = turned(q, rotary), turned(k, rotary), None
    fq, fk = (y.to(v.dtype) for y in _features(module.feature_map, q, k, key_mask))
    options = {"causal": module.causal, "key_mask": key_mask}
    if module.decay is not None:
        options["log_decay"] = module.decay(x).to(x.dtype)
    if module.decay_back is not None:
        options["log_decay_back"] = module.decay_back(x).to(x.dtype)
    if rotary is None:
        o = linear_definition.quadratic(fq, fk, v, normalize=module.normalize, **options)
    else:
        above = turned(fq, rotary), turned(fk, rotary)
        o = linear_definition.quadratic(*above, v, normalize=False, **options)
        if module.normalize:
            weights = linear_definition.quadratic(fq, fk, torch.ones_like(v), normalize=False, **options)
            o = torch.where(weights == 0, 0.0, o / torch.where(weights == 0, 1.0, weights))
    if not module.normalize:
        o = o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt() * module.o_norm.weight
    return o


def _features(phi, q, k, key_mask):
    """φ(q) and φ(k) with their scales, of a map that may be fitted, placed, or no more than a module."""
    if getattr(phi, "fit", "") == "call":
        phi = phi.fitted(q, k, query_mask=key_mask, key_mask=key_mask)
    if isinstance(phi, PositionalMap):
        phi = phi.at(torch.arange(q.shape[2]))
    if not hasattr(phi, "queries"):
        return phi(q), phi(k)
    both = phi.queries(q), phi.keys(k)
    return (f if scale is None else (f * scale.exp()[..., None]).to(f.dtype) for f, scale in both)


def _corrected(module: GatedDeltaAttention, x, real=None):
    """One sequence of gated DeltaNet, (t, hidden), token by token: what is not real is passed over."""
    h, g, d = module.num_heads, module.num_kv_heads, module.head_dim
    y, S, seen = torch.zeros_like(x), x.new_zeros(g, d, d), []
    log_decay = (
        x.new_zeros(len(x), g, 1) if module.decay is None else _of_tokens(module.decay(x[None]), len(x)).to(x.dtype)
    )
    for i in range(len(x)) if real is None else real.nonzero()[:, 0].tolist():
        seen.append(torch.cat([module.q_proj(x[i]), module.k_proj(x[i]), module.v_proj(x[i])]))
        last = seen[-module.filters.shape[1] :]
        mixed = sum(module.filters[:, -1 - back] * inputs for back, inputs in enumerate(reversed(last)))
        q, k, v = (u.view(-1, d) for u in (mixed * mixed.sigmoid()).split([h * d, g * d, g * d]))
        q, k = (u / (u.square().sum(-1, keepdim=True) + 1e-6).sqrt() for u in (q, k))
        S = log_decay[i].exp()[..., None] * S
        wrong = v - torch.einsum("gde,gd->ge", S, k)
        S = S + module.beta_proj(x[i]).sigmoid()[:, None, None] * k[:, :, None] * wrong[:, None]
        o = torch.einsum("hde,hd->he", S.repeat_interleave(h // g, 0), q) / d**0.5
        o = o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt() * module.norm.weight
        gate = module.gate_proj(x[i]).view(h, d)
        y[i] = module.o_proj((o * gate * gate.sigmoid()).flatten())
    return y


def _scanned(module: Mamba2Attention, x, real=None):
    """One sequence of Mamba-2, (t, hidden), token by token."""
    h, n, p = module.num_heads, module.state_size, module.head_dim
    y, S, seen = torch.zeros_like(x), x.new_zeros(h, n, p), []
    for i in range(len(x)) if real is None else real.nonzero()[:, 0].tolist():
        gate, inputs, dt = module.in_proj(x[i]).split([h * p, h * p + 2 * n, h])
        seen.append(inputs)
        last = seen[-module.filters.shape[1] :]
        mixed = module.filter_bias + sum(
            module.filters[:, -1 - back] * inputs for back, inputs in enumerate(reversed(last))
        )
        v, k, q = (mixed * mixed.sigmoid()).split([h * p, n, n])
        dt = (1 + (dt + module.dt_bias).exp()).log()[:, None]
        v = v.view(h, p)
        S = torch.exp(-dt * module.A_log.exp()[:, None])[..., None] * S + k[:, None] * (dt * v)[:, None]
        o = (torch.einsum("hne,n->he", S, q) + module.D[:, None] * v).flatten() * gate * gate.sigmoid()
        y[i] = module.o_proj(o / (o.square().mean() + 1e-5).sqrt() * module.norm.weight)
    return y


def _learned(module: Rwkv7Attention, x, real=None):
    """One sequence of RWKV-7, (t, hidden), token by token."""
    m, h = module.mixing, module.num_heads
    heads = lambda z: z.view(h, -1)  # noqa: E731
    y, S, before = torch.zeros_like(x), x.new_zeros(h, module.head_dim, module.head_dim), torch.zeros_like(x[0])
    for i in range(len(x)) if real is None else real.nonzero()[:, 0].tolist():
        r, w, k, v, a, g = (x[i] + (before - x[i]) * mixture[0] for mixture in m.x_rwkvag)
        before = x[i]
        decay = (-(-0.5 * torch.ones_like(x[0, 0])).exp() * (m.w0[0, 0] + m.w2 @ torch.tanh(m.w1 @ w)).sigmoid()).exp()
        alpha, gate = (m.a0[0, 0] + m.a2 @ (m.a1 @ a)).sigmoid(), m.g2 @ (m.g1 @ g).sigmoid()
        r, k, v = m.receptance(r), m.key(k), m.value(v)
        direction = heads(k * m.k_k[0, 0])
        direction = direction / direction.norm(dim=-1, keepdim=True)
        r, k, v = heads(r), heads(k * (1 + (alpha - 1) * m.k_a[0, 0])), heads(v)
        read = torch.einsum("hd,hde->he", direction, S)
        S = (
            heads(decay)[..., None] * S
            - (direction * heads(alpha))[..., None] * read[:, None]
            + k[..., None] * v[:, None]
        )
        o = torch.einsum("hd,hde->he", r, S)
        o = (o - o.mean(-1, keepdim=True)) / (o.var(-1, keepdim=True, unbiased=False) + 64e-5).sqrt()
        o = o.flatten() * m.ln_x.weight + m.ln_x.bias + ((r * k * m.r_k).sum(-1, keepdim=True) * v).flatten()
        y[i] = m.output(o * gate)
    return y


def _of_tokens(log_decay, t):
    """(g,), (1, g, t) or (1, g, t, d) as (t, g, 1 or d)."""
    if log_decay.ndim == 1:
        return log_decay.expand(t, -1)[..., None]
    return log_decay[0].movedim(1, 0).reshape(t, log_decay.shape[1], -1)


RECURRENCES = {GatedDeltaAttention: _corrected, Mamba2Attention: _scanned, Rwkv7Attention: _learned}

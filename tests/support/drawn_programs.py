"""Random small programs: every instruction, in shapes that can't be confused."""

import random
from typing import Any

import torch
from torch import Tensor

from tarnn.program.experts import Expert, experts, route
from tarnn.program.hybrid import REACHES, hybrid
from tarnn.program.instructions import Program
from tarnn.program.recording import (
    FUNCTIONS,
    Recorder,
    Register,
    apply,
    clamp,
    concat,
    delta,
    features,
    filter,
    head_product,
    heads,
    linear,
    low_rank_delta,
    mix,
    norm,
    product,
    products,
    rotate,
    softmax,
)
from tarnn.program.scans import diagonal_scan, selective_scan

VOCABULARY = 17
FEATURES = {  # by function: further options
    "identity": {}, "elu": {}, "relu": {"shift": 0.1}, "squared_relu": {}, "abs": {}, "sigmoid": {}, "gelu": {},
    "cos": {}, "plain_exp": {"shift": 0.01}, "exp": {"square": 0.5, "offset": -0.3, "number": 0.0, "shift": 0.001},
    "waves": {"square": -0.5, "gain": 0.3}, "halves": {}, "dpfp": {"number": 2}, "cosformer": {"number": 0.01},
    "pairs": {"parts": (1.0, 0.5, 0.7, 0.4, 0.0, 0.0)},
}  # fmt: skip


class Drawn:
    """One program in the making, from a seed."""

    def __init__(self, seed: int):
        self.seed, self.random = seed, random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.record = Recorder(limit=64)

    def weight(self, *shape: int, scale: float | None = None) -> Tensor:
        return torch.randn(shape, generator=self.generator) * (shape[-1] ** -0.5 if scale is None else scale)

    def program(self) -> Program:
        n = self.random.choice([12, 20])
        x = self.embed(n)
        for i in range(self.random.randint(1, 3)):
            mixer = self.random.choice(MIXERS) if i else MIXERS[self.seed % len(MIXERS)]
            x = x + self.into(mixer(self, self.normed(x)), n)
            x = x + self.random.choice([self.mlp, self.mlp, self.experts])(self.normed(x))
        bias, cap = self.random.choice([None, self.weight(VOCABULARY)]), self.random.choice([0.0, 2.0])
        return self.record.head(self.normed(x), self.weight(VOCABULARY, n), bias, softcap=cap)

    def embed(self, n: int) -> Register:
        places = self.weight(64, 5, scale=1) if self.random.random() < 0.5 else None
        tokens = self.weight(VOCABULARY, n - 5 * (places is not None), scale=1)
        if places is not None:
            places = eighths(places)
        self.embedded = self.record.embed(eighths(tokens), scale=1.5, places=places, width=n)
        return self.embedded

    def normed(self, x: Register) -> Register:
        gain = 1 + self.weight(x.size, scale=0.2)
        bias = self.random.choice([None, self.weight(x.size)])
        return norm(x, gain, bias, eps=1e-5, kind=self.random.choice(["rms", "layer", "l2", "length"]))

    def into(self, x: Register, n: int, exact: bool = False) -> Register:
        bias = self.random.choice([None, self.weight(n)])
        return product(x, self.weight(n, x.size), bias, exact=exact)

    def mlp(self, x: Register) -> Register:
        up = apply(self.into(x, 14), self.random.choice(FUNCTIONS))
        up = up * self.random.choice(
            [0.5, self.weight(14, scale=1), self.into(x, 14), apply(self.into(x, 1), "sigmoid")]
        )
        return self.into(up, x.size)

    def experts(self, x: Register) -> Register:
        """Draw a router of the embedding, whose logits are exact in every format, and experts that share one."""
        n, groups, function = (
            self.random.choice([6, 8, 70]),
            self.random.choice([1, 1, 2]),
            self.random.choice(FUNCTIONS),
        )
        logits = product(self.embedded, eighths(self.weight(n, self.embedded.size, scale=0.5)), exact=True)
        scores, k = self.random.choice(["softmax", "sigmoid"]), self.random.randint(1, 3)
        bias = self.weight(n, scale=1) if scores == "sigmoid" else None
        options = {"normalize": self.random.random() < 0.5, "eps": 1e-3, "scale": 1.5}
        chosen, weights = route(logits, k, scores=scores, bias=bias, groups=groups, **options)
        m, gated = self.random.choice([14, 70]), self.random.random() < 0.7
        some = [
            Expert(self.weight(m, x.size) if gated else None, self.weight(m, x.size), self.weight(x.size, m))
            for _ in range(n)
        ]
        y = experts(x, chosen, weights, some, function=function)
        return y + self.into(apply(self.into(x, 14), "silu"), x.size) * apply(self.into(x, 1, exact=True), "sigmoid")

    def qkv(self, x: Register, q_heads: int, k_heads: int, v_heads: int, d: int, e: int) -> list[Register]:
        sizes = ((q_heads, d), (k_heads, d), (v_heads, e))
        return [heads(self.into(x, h * width), h) for h, width in sizes]

    def decay(self, x: Register, n: int, f: int) -> Register | Tensor | None:
        kind = self.random.choice(["none", "head", "token", "channel"])
        if kind in ("none", "head"):
            return None if kind == "none" else -self.weight(n, scale=0.3).abs()
        raw = heads(self.into(x, n if kind == "token" else n * f, exact=True), n)
        return apply(apply(raw, "softplus"), "neg") * 0.2

    def softmax(self, x: Register) -> Register:
        g = self.random.choice([1, 3, 6])
        q, k, v = self.qkv(x, 6, g, g, 4, 5)
        frequencies = self.weight(self.random.choice([1, 2]), scale=1).abs()
        interleaved = self.random.random() < 0.5
        q, k = (rotate(y, frequencies, interleaved=interleaved) for y in (q, k))
        return softmax(q, k, v, self.record.state("KVCache"), scale=0.4)

    def latent_softmax(self, x: Register) -> Register:
        """Draw what latent attention has: one key, the first channels of which are the values of all heads."""
        state, frequencies = self.record.state("KVCache"), self.weight(1, scale=1).abs()
        n, e = self.random.choice([(3, 7), (2, 19)])
        turned = [rotate(heads(self.into(x, 2 * h), h), frequencies, interleaved=True) for h in (n, 1)]
        q = concat(head_product(heads(self.into(x, 4 * n), n), self.weight(n, e, 4)), turned[0])
        k = concat(norm(self.into(x, e), eps=1e-6), turned[1])
        return head_product(softmax(q, k, e, state, scale=0.4), self.weight(n, 3, e))

    def linear(self, x: Register) -> Register:
        q_heads, k_heads, v_heads = self.random.choice([(6, 3, 3), (3, 3, 3), (2, 2, 4)])
        q, k, v = self.qkv(x, q_heads, k_heads, v_heads, 3, 5)
        function = self.random.choice(list(FEATURES))
        omega = self.weight(k_heads, 4, 3) if function not in ("dpfp", "pairs") and self.random.random() < 0.7 else None
        (q, u), (k, w) = (
            features(y, function, omega=omega, move=self.move(k_heads), **FEATURES[function]) for y in (q, k)
        )
        positive = function not in ("identity", "cos", "waves", "gelu", "pairs")  # else denominators come near 0
        scales = {"q_scale": u, "k_scale": w} if self.random.random() < 0.7 else {}
        other: dict[str, Any] = {}
        if positive and self.random.random() < 0.3:
            other = {"denominator": (q, k)}
            q, k = (rotate(y, self.weight(1, scale=1).abs()) for y in (q, k))
        other["keep_z"] = positive or bool(scales) or self.random.random() < 0.5
        other["at_least_one"] = self.random.random() < 0.3
        positive = positive or other["at_least_one"]
        other["keep_z"] = other["keep_z"] or positive
        log_decay = self.decay(x, max(k_heads, v_heads), q.width)
        kind = "LinearState" if other["keep_z"] else "DeltaState"
        return linear(q, k, v, self.record.state(kind), log_decay=log_decay, normalize=positive, **scales, **other)

    def move(self, k_heads: int) -> dict[str, Tensor] | None:
        if self.random.random() < 0.6:
            return None
        h = self.random.choice([1, k_heads])
        move = {name: self.weight(h, 3, scale=0.3) for name in ("centre", "weight")}
        return move | {"stretch": 1 + self.weight(h, 3, scale=0.1), "constant": self.weight(h, scale=0.3)}

    def delta(self, x: Register) -> Register:
        q_heads, k_heads, v_heads = self.random.choice([(2, 2, 4), (3, 3, 3), (4, 2, 2)])
        state, sizes = self.record.state("GatedDeltaState"), (q_heads * 4, k_heads * 4, v_heads * 5)
        taps, bias = self.weight(sum(sizes), 3, scale=0.5), self.random.choice([None, self.weight(sum(sizes))])
        rows = [self.weight(size, x.size) for size in sizes[:2]]
        whole = self.random.choice([products(x, *rows, self.weight(5, v_heads, x.size)), self.into(x, sum(sizes))])
        mixed = filter(whole, taps, state, bias, function=self.random.choice(["silu", "identity"]))
        q, k, v = (heads(y, h) for y, h in zip(mixed.split(*sizes), (q_heads, k_heads, v_heads), strict=True))
        q, k, n = norm(q, eps=1e-6, kind="l2") * 0.5, norm(k, eps=1e-6, kind="l2"), max(k_heads, v_heads)
        beta = heads(apply(self.into(x, n, exact=True), "sigmoid"), n)
        o = delta(q, k, v, beta, state, log_decay=self.decay(x, n, 4))
        return norm(o, eps=1e-6) * apply(heads(self.into(x, o.size), o.heads), "silu")

    def gated_softmax(self, x: Register) -> Register:
        """Draw norms of each head, a part of it rotated, and gates whose rows lie between those of the queries."""
        rows, state, frequencies = (
            self.weight(4, 2, 6, x.size),
            self.record.state("KVCache"),
            self.weight(2, scale=1).abs(),
        )
        q, gate = (heads(product(x, rows[:, i]), 4) for i in (0, 1))
        k, v = (heads(self.into(x, 12), 2) for _ in range(2))
        q, k = (rotate(norm(y, 1 + self.weight(6, scale=0.2), eps=1e-5), frequencies) for y in (q, k))
        return softmax(q, k, v, state, scale=0.4) * apply(gate, "sigmoid")

    def state_space(self, x: Register) -> Register:
        """Draw what Mamba-2 has: keys and queries of groups, values times a step per head, a weight per head, group norms."""
        state, (n, groups) = self.record.state("Mamba2State"), self.random.choice([(4, 2), (3, 1), (2, 2)])
        sizes = n * 5, groups * 3, groups * 3
        whole = filter(self.into(x, sum(sizes)), self.weight(sum(sizes), 4, scale=0.5), state)
        v, k, q = (heads(y, h) for y, h in zip(whole.split(*sizes), (n, groups, groups), strict=True))
        step = heads(apply(self.into(x, n, exact=True), "softplus"), n)
        step = self.random.choice([step, clamp(step, 0.3, 0.8)])
        log_decay = step * -self.weight(n, 1, scale=0.5).abs()
        y = linear(q, k, v * step, state, log_decay=log_decay, normalize=False, keep_z=False)
        y = (y + v * self.weight(n, 1)) * heads(apply(self.into(x, n * 5), "silu"), n)
        return norm(heads(y, groups), 1 + self.weight(n * 5, scale=0.2), eps=1e-5)

    def hybrid(self, x: Register) -> Register:
        q, k, v = self.qkv(x, 6, 3, 3, 3, 5)
        reach = [self.random.choice(REACHES) for _ in range(3)]
        sides, (n, function) = {}, (reach.count("features"), self.random.choice(["elu", "relu", "exp", "halves"]))
        projected = self.random.random() < 0.7
        for side in ("queries", "keys") if n else ():
            omega = self.weight(n, 4, 3) if projected else None
            sides[side] = {"function": function, "omega": omega, "move": self.move(n), **FEATURES[function]}
        if n and self.random.random() < 0.3:
            sides = {"queries": {"function": "log_softmax"}, "keys": {"function": "identity"}, "log_features": True}
        far: dict[str, Any] = {"far_bias": self.random.choice([None, self.weight(6)])}
        far["far_until"] = self.random.choice([None, 4])
        window, sinks = self.random.randint(1, 3), self.random.randint(0, 2)
        return hybrid(q, k, v, reach=reach, scale=0.4, window=window, sinks=sinks, **sides, **far)

    def low_rank_delta(self, x: Register) -> Register:
        state = self.record.state("Rwkv7State")
        first, second = mix(x, self.weight(2, x.size, scale=0.5), state)
        r, k, v, a = *self.qkv(first, 2, 2, 2, 4, 4), heads(self.into(second, 8), 2)
        decay = apply(apply(head_product(second, self.weight(2, 4, x.size), self.weight(2, 4)), "softplus"), "neg")
        a = norm(a, eps=1e-12, kind="length")
        b = a * apply(heads(self.into(second, 2), 2), "sigmoid")
        return low_rank_delta(r, decay, k, v, apply(a, "neg"), b, state)

    def selective_scan(self, x: Register) -> Register:
        """Draw channels of one head or several, more or fewer than a panel has."""
        state, (n, width) = self.record.state("FilteredScanState"), self.random.choice([(1, 70), (2, 7), (3, 16)])
        numbers = self.random.choice([1, 4, 7])
        u = heads(filter(self.into(x, n * width), self.weight(n * width, 4, scale=0.5), state), n)
        step, B, C = (heads(self.into(x, n * m, exact=m == width), n) for m in (width, numbers, numbers))
        y = selective_scan(u, apply(step, "softplus"), B, C, -self.weight(n * width, numbers, scale=0.7).abs(), state)
        return y * self.random.choice([apply(self.into(x, 1), "sigmoid"), 1 - y]) - u

    def diagonal_scan(self, x: Register) -> Register:
        state, n = self.record.state("FilteredScanState"), self.random.choice([5, 64, 70])
        u = filter(self.into(x, n), self.weight(n, 3, scale=0.5), state, function="identity")
        log_decay = apply(apply(self.into(x, n, exact=True), "softplus"), "neg")
        return diagonal_scan(u, log_decay, state, normalize=self.random.random() < 0.5)


MIXERS = (
    Drawn.softmax, Drawn.gated_softmax, Drawn.latent_softmax, Drawn.linear, Drawn.state_space, Drawn.delta,
    Drawn.low_rank_delta, Drawn.hybrid, Drawn.selective_scan, Drawn.diagonal_scan,
)  # fmt: skip


def eighths(x: Tensor) -> Tensor:
    """Round to multiples of ⅛, which a few products leave exact."""
    return (x * 8).round() / 8


def drawn_program(seed: int) -> Program:
    """Record a program of one to three layers that the seed decides on; as many seeds in a row as `MIXERS` have all kinds."""
    return Drawn(seed).program()

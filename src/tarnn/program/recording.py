"""Functions that write a program: each appends one instruction and returns the register that it writes. Nothing is computed.

    record = Recorder(limit=config.max_position_embeddings)
    x = record.embed(weights["embed_tokens.weight"])
    h = norm(x, weights["norm.weight"], eps=1e-6)
    q = rotate(heads(product(h, wq), 8), frequencies)
    o = softmax(q, k, v, record.state("KVCache"), scale=8**-0.5)
    program = record.head(x + product(o, wo), weights["lm_head.weight"])

A `Register` is (heads, width) numbers per token. `+`, `-` and `*` take a register of the same shape, one number per head
(heads, 1), a weight that broadcasts against (heads, width), or a number. Shapes are checked as instructions are recorded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tarnn.program.feature_functions import width_of
from tarnn.program.instructions import Instruction, Number, Program, StateSpec, View

# what `apply` knows, element by element; in this order in csrc/runtime/program.h
FUNCTIONS = "identity silu gelu gelu_tanh relu squared_relu sigmoid tanh softplus exp neg log_sigmoid".split()  # noqa: SIM905


class ProgramError(ValueError):
    """Instructions whose shapes do not fit each other."""


@dataclass(frozen=True, eq=False)
class Register:
    """Numbers of every token: heads × width of them."""

    record: "Recorder"
    view: View

    @property
    def heads(self) -> int:
        return self.view.heads

    @property
    def width(self) -> int:
        return self.view.width

    @property
    def size(self) -> int:
        """Numbers per token."""
        return self.view.size

    def __add__(self, other: Any) -> "Register":
        return self.record.binary("add", self, other)

    def __mul__(self, other: Any) -> "Register":
        return self.record.binary("mul", self, other)

    __radd__, __rmul__ = __add__, __mul__

    def __sub__(self, other: Any) -> "Register":
        return self + (apply(other, "neg") if isinstance(other, Register) else -other)

    def __rsub__(self, other: Any) -> "Register":
        return apply(self, "neg") + other

    def split(self, *widths: int) -> "tuple[Register, ...]":
        """Consecutive channels, each as one head."""
        if sum(widths) != self.size:
            raise ProgramError(f"a register of {self.size} numbers can't be split into {widths}")
        ends = torch.tensor([0, *widths]).cumsum(0).tolist()
        return tuple(
            Register(self.record, View(self.view.register, self.view.offset + end - width, 1, width))
            for width, end in zip(widths, ends[1:], strict=True)
        )


class LayerState:
    """The fields of one layer's state, as its instructions declare them one after the other."""

    def __init__(self, record: "Recorder", layer: int, kind: str):
        self.record, self.layer, self.kind = record, layer, kind

    def add(self, name: str, *shape: int, grows: int | None = None, **more: Any) -> int:
        """Declare a field; return its index among the program's states."""
        self.record.states.append(StateSpec(self.layer, self.kind, name, shape, grows=grows, **more))
        return len(self.record.states) - 1


class Recorder:
    """A program in the making.

    limit: positions that the model has. converted: what a family's softmax layers ask for another kind of attention, if there is
    one. facts: plain data that the program keeps.
    """

    def __init__(self, limit: int | None = None, *, converted: Any = None, **facts: Any):
        self.instructions: list[Instruction] = []
        self.registers: list[int] = []
        self.states: list[StateSpec] = []
        self.layers: list[str] = []
        self.limit, self.converted, self.facts = limit, converted, facts

    def state(self, kind: str) -> LayerState:
        """Begin the state of a layer, which may have no field. kind: a name of `tarnn.program.state.CLASSES`."""
        self.layers.append(kind)
        return LayerState(self, len(self.layers) - 1, kind)

    def embed(
        self,
        tokens: Float[Tensor, "v n"],
        *,
        scale: float = 1.0,
        places: Float[Tensor, "p m"] | None = None,
        sinusoidal: int = 0,
        classes: Float[Tensor, "c n"] | None = None,
        width: int | None = None,
        rows: bool = False,
    ) -> Register:
        """Embed: (tokens[id] + classes[class])·scale + places[position], `width` numbers per token (default n).

        Narrower tokens and classes fill the first channels, narrower places the last; zeros elsewhere. sinusoidal: so many
        channels of places, by the formula and not from a table. For these and for classes each call brings a row per token
        that is added: `tarnn.program.extra` makes them. rows: who calls brings such rows, of `width` numbers.
        """
        width = width or tokens.shape[1]
        numbers = {"scale": scale, "sinusoidal": sinusoidal, "extra": rows or sinusoidal > 0 or classes is not None}
        weights = _some(tokens=tokens, places=places, classes=classes)
        return self.add("embed", (), [(1, width)], weights, numbers)[0]

    def head(
        self, x: Register, weight: Float[Tensor, "o n"], bias: Tensor | None = None, *, softcap: float = 0.0
    ) -> Program:
        """End the program with a product whose rows are put out: of the last token of each sequence, or of all.

        softcap: c, if outputs are c·tanh(y/c); 0: they are y.
        """
        _check(weight.shape[1] == x.size, f"the head reads {weight.shape[1]} numbers, and gets {x.size}")
        self.add("head", (x,), [(1, len(weight))], _some(weight=weight, bias=bias), {"softcap": softcap})
        instructions, states = tuple(self.instructions), tuple(self.states)
        return Program(instructions, tuple(self.registers), states, tuple(self.layers), self.limit, self.facts)

    def binary(self, kind: str, a: Register, b: Any) -> Register:
        """Record a + b or a·b."""
        if isinstance(b, Register):
            _check(b.record is self, "a register of another program came in")
            same = b.size == a.size and (b.heads == a.heads or 1 in (a.heads, b.heads))
            _check(same or b.size in (1, a.heads), f"{kind} of {a.heads} × {a.width} and {b.heads} × {b.width} numbers")
            return self.add(kind, (a, b), [(a.heads, a.width)])[0]
        if isinstance(b, Tensor):
            wide = all(y in (1, x) for x, y in zip((a.width, a.heads), reversed(b.shape), strict=False)) and b.ndim <= 2
            fits = wide or b.shape == (a.size,)
            _check(fits, f"{kind} of {a.heads} × {a.width} numbers and a weight {tuple(b.shape)}")
            return self.add(kind, (a,), [(a.heads, a.width)], {"weight": b})[0]
        return self.add(kind, (a,), [(a.heads, a.width)], numbers={"number": float(b)})[0]

    def room(self, size: int) -> Register:
        """Return a register that instructions will write, part by part."""
        self.registers.append(size)
        return Register(self, View(len(self.registers) - 1, 0, 1, size))

    def add(
        self,
        kind: str,
        inputs: Sequence[Register],
        outputs: Sequence[tuple[int, int] | Register],
        weights: Mapping[str, Tensor] | None = None,
        numbers: Mapping[str, Number] | None = None,
        states: Sequence[int] = (),
    ) -> tuple[Register, ...]:
        """Append an instruction. outputs: heads and width of each register that it writes, or a part of `room`."""
        made = tuple(y if isinstance(y, Register) else heads(self.room(y[0] * y[1]), y[0]) for y in outputs)
        views = tuple(x.view for x in inputs), tuple(x.view for x in made)
        self.instructions.append(Instruction(kind, *views, weights or {}, numbers or {}, tuple(states)))
        return made


def heads(x: Register, num_heads: int) -> Register:
    """View the same numbers as so many heads: a view."""
    _check(x.size % num_heads == 0, f"{x.size} numbers are no {num_heads} heads")
    return Register(x.record, View(x.view.register, x.view.offset, num_heads, x.size // num_heads))


def concat(*parts: Register) -> Register:
    """Put the heads of several registers side by side: each head has the numbers of the first, then those of the next."""
    first = parts[0]
    _check(len({x.heads for x in parts}) == 1, f"parts of {', '.join(f'{x.heads} × {x.width}' for x in parts)} numbers")
    return first.record.add("concat", parts, [(first.heads, sum(x.width for x in parts))])[0]


def product(
    x: Register,
    weight: Float[Tensor, "o n"] | Float[Tensor, "blocks o n"],
    bias: Float[Tensor, " o"] | None = None,
    *,
    exact: bool = False,
    to: Register | None = None,
) -> Register:
    """Multiply: W x + bias. exact: in any format W keeps all its digits (what gates, decays and routes).

    A weight of several blocks is a view of rows that do not lie side by side in the checkpoint: W has them one block behind
    the other. to: the part of a register that is written, by default a new one.
    """
    outputs = weight.shape[:-1].numel()
    _check(weight.shape[-1] == x.size, f"a product reads {weight.shape[-1]} numbers, and gets {x.size}")
    _check(bias is None or bias.shape == (outputs,), "a product's bias has another length than its outputs")
    _check(to is None or to.size == outputs, f"a product of {outputs} numbers is no {0 if to is None else to.size}")
    return x.record.add("product", (x,), [to or (1, outputs)], _some(weight=weight, bias=bias), {"exact": exact})[0]


def products(x: Register, *weights: Float[Tensor, "..."]) -> Register:
    """Multiply by several weights; the outputs follow one another in one register."""
    sizes = [w.shape[:-1].numel() for w in weights]
    y = x.record.room(sum(sizes))
    for w, part in zip(weights, y.split(*sizes), strict=True):
        product(x, w, to=part)
    return y


def head_product(x: Register, weight: Float[Tensor, "h o n"], bias: Float[Tensor, "h o"] | None = None) -> Register:
    """Multiply each head: W_h x_h + bias_h; one head of x: the same x for all. Kept as float32 or bfloat16."""
    h, o, n = weight.shape
    _check(x.width == n and x.heads in (1, h), f"a product of {h} heads reads {n} numbers, gets {x.heads} × {x.width}")
    return x.record.add("head_product", (x,), [(h, o)], _some(weight=weight, bias=bias))[0]


def norm(
    x: Register, gain: Tensor | None = None, bias: Tensor | None = None, *, eps: float, kind: str = "rms"
) -> Register:
    """Each head divided: rms: by √(mean x² + eps); layer: less its mean first; l2: by √(Σ x² + eps); length: by max(√Σ x², eps).

    gain, bias: of one head's width, or of all heads' channels.
    """
    for w in (gain, bias):
        _check(w is None or w.numel() in (x.width, x.size), f"a norm of {x.heads} × {x.width} numbers has another gain")
    return x.record.add("norm", (x,), [(x.heads, x.width)], _some(gain=gain, bias=bias), {"eps": eps, "kind": kind})[0]


def apply(x: Register, function: str) -> Register:
    """Apply a function of `FUNCTIONS` to each number."""
    _check(function in FUNCTIONS, f"{function} is none of {', '.join(FUNCTIONS)}")
    return x.record.add("apply", (x,), [(x.heads, x.width)], numbers={"function": function})[0]


def clamp(x: Register, least: float, most: float) -> Register:
    """Keep each number from `least` to `most`."""
    return x.record.add("clamp", (x,), [(x.heads, x.width)], numbers={"least": least, "most": most})[0]


def rotate(x: Register, frequencies: Float[Tensor, " p"], *, interleaved: bool = False) -> Register:
    """Rotary positions: pairs of the first 2p channels of each head turn by position·frequency.

    Pairs are (c, c + p), or (2c, 2c + 1) if interleaved. float32 frequencies give float32 angles.
    """
    _check(2 * len(frequencies) <= x.width, f"{2 * len(frequencies)} channels of {x.width} can't be rotated")
    weights = {"frequencies": frequencies}
    return x.record.add("rotate", (x,), [(x.heads, x.width)], weights, {"interleaved": interleaved})[0]


def mix(x: Register, mixtures: Float[Tensor, "m n"], state: LayerState, name: str = "last") -> tuple[Register, ...]:
    """Mix with the token before: x + (before − x)·μ for each of m μ; before the first: zeros."""
    _check(mixtures.shape[1] == x.size, f"mixtures of {mixtures.shape[1]} numbers of a register of {x.size}")
    outputs = [(1, x.size)] * len(mixtures)
    return x.record.add("mix", (x,), outputs, {"mixtures": mixtures}, states=[state.add(name, x.size)])


def filter(
    x: Register,
    taps: Float[Tensor, "n w"],
    state: LayerState,
    bias: Tensor | None = None,
    *,
    function: str = "silu",
    name: str = "tokens",
) -> Register:
    """Filter: function(Σ_j taps[c, j]·x_c of the token w − 1 − j before + bias), each channel along time."""
    n, w = taps.shape
    _check(n == x.size, f"filters of {n} channels read a register of {x.size}")
    states = [state.add(name, w - 1, n)]
    return x.record.add("filter", (x,), [(1, n)], _some(taps=taps, bias=bias), {"function": function}, states)[0]


def softmax(q: Register, k: Register, v: Register | int, state: LayerState, *, scale: float) -> Register:
    """Softmax attention over all tokens so far; several query heads may share a key head.

    v: a number if values are so many first channels of the keys, which are then all that is kept (latent attention).
    """
    inputs = (q, k) if isinstance(v, int) else (q, k, v)
    e, v_heads = (v, k.heads) if isinstance(v, int) else (v.width, v.heads)
    fits = (
        q.width == k.width and k.heads == v_heads and q.heads % k.heads == 0 and (len(inputs) == 3 or 0 < e <= k.width)
    )
    _check(fits, f"softmax of queries {q.heads} × {q.width}, keys {k.heads} × {k.width}, values {v_heads} × {e}")
    states = [state.add(name, k.heads, 0, x.width, grows=1) for name, x in zip("kv", inputs[1:], strict=False)]
    return q.record.add("softmax", inputs, [(q.heads, e)], numbers={"scale": scale}, states=states)[0]


def linear(
    q: Register,
    k: Register,
    v: Register,
    state: LayerState,
    *,
    log_decay: Register | Tensor | None = None,
    q_scale: Register | None = None,
    k_scale: Register | None = None,
    denominator: tuple[Register, Register] | None = None,
    normalize: bool = True,
    at_least_one: bool = False,
    keep_z: bool = True,
    eps: float = 0.0,
) -> Register:
    """Attend linearly: S ← e^d S + e^w k vᵀ, z ← e^d z + e^w k, o = qᵀS / (qᵀz + eps), over features.

    Without normalize o = e^u qᵀS. at_least_one (mLSTM): the denominator is max(|qᵀz|, 1) in true units, where S, z and eps are in
    units of e^M, and M begins as 0.

    Heads: q has as many as k or a multiple, or v has a multiple of k's (grouped values); a state for each of max(k, v) heads.
    log_decay d ≤ 0: a weight (heads,), a register (heads, 1), or one for each feature (heads, f). k_scale w, q_scale u
    (heads, 1): logarithms kept apart; with w the state has a maximum M. denominator: other q and k, for z alone. keep_z:
    whether the state has z, which only `normalize` needs. eps 0: the default.
    """
    n, (f, e) = max(k.heads, v.heads), (k.width, v.width)
    fits = q.width == f and (
        (q.heads % k.heads == 0 and v.heads == k.heads) or (q.heads == k.heads and n % k.heads == 0)
    )
    _check(fits, _three("linear", q, k, v))
    _check(keep_z or not (normalize or k_scale), "a state without z has no denominator")
    _check(normalize or not at_least_one, "a denominator of at least one is one")
    inputs = [q, k, v]
    numbers = {"normalize": normalize, "at_least_one": at_least_one, "keep_z": keep_z, "eps": eps}
    for name, some in (("decay", log_decay), ("q_scale", q_scale), ("k_scale", k_scale)):
        if isinstance(some, Register):
            numbers[name] = len(inputs)
            inputs.append(some)
    if denominator is not None:
        numbers["denominator"] = len(inputs)
        inputs += denominator
    weights = {"log_decay": log_decay} if isinstance(log_decay, Tensor) else {}
    states = [state.add("S", n, f, e)]
    if keep_z:
        states.append(state.add("z", n, f))
    if k_scale is not None:
        states.append(state.add("M", n, fill=0.0 if at_least_one else float("-inf")))
    return q.record.add("linear", inputs, [(max(q.heads, n), e)], weights, numbers, states)[0]


def delta(
    q: Register,
    k: Register,
    v: Register,
    beta: Register,
    state: LayerState,
    *,
    log_decay: Register | Tensor | None = None,
    name: str = "S",
) -> Register:
    """The delta rule: S ← e^d S, then S ← S + β k (v − kᵀS)ᵀ, o = Sᵀq. A state for each of max(k, v) heads; heads as in `linear`.

    beta (heads of the states, 1). log_decay: a weight (heads,), or a register (heads, 1) or (heads, channels of a key).
    """
    n = max(k.heads, v.heads)
    fits = q.width == k.width and beta.size == n and n % k.heads == 0 and max(q.heads, n) % k.heads == 0
    _check(fits, _three("delta", q, k, v))
    inputs, weights = [q, k, v, beta], {}
    if isinstance(log_decay, Register):
        inputs.append(log_decay)
    elif log_decay is not None:
        weights["log_decay"] = log_decay
    states = [state.add(name, n, k.width, v.width)]
    return q.record.add("delta", inputs, [(max(q.heads, n), v.width)], weights, {}, states)[0]


def low_rank_delta(
    r: Register, log_decay: Register, k: Register, v: Register, a: Register, b: Register, state: LayerState
) -> Register:
    """RWKV-7: S ← Diag(e^d) S + b (aᵀS) + k vᵀ, o = Sᵀr; all (heads, d)."""
    d = r.width
    _check(all((x.heads, x.width) == (r.heads, d) for x in (log_decay, k, v, a, b)), "low_rank_delta wants equal heads")
    states = [state.add("S", r.heads, d, d)]
    return r.record.add("low_rank_delta", (r, log_decay, k, v, a, b), [(r.heads, d)], states=states)[0]


def features(
    x: Register,
    function: str,
    *,
    omega: Float[Tensor, "h m d"] | None = None,
    bias: Float[Tensor, "h m"] | None = None,
    move: Mapping[str, Tensor] | None = None,
    **numbers: Number,
) -> tuple[Register, Register]:
    """Compute φ(x) of each head, and the logarithm that is kept apart, (heads, 1), zero for most maps.

    x ← (x − centre)·stretch with weight·x + constant as its log-weight (`move`: these four, of 1 or all heads), then
    u = Ω x + bias − square·|x|² + offset and φ = gain·function(u) + shift. function: a name of
    `feature_functions.FUNCTIONS`, with its `number` or `parts`.
    """
    width = width_of(function, x.width, omega, numbers)
    weights = _some(omega=omega, bias=bias, **(move or {}))
    outputs = [(x.heads, width), (x.heads, 1)]
    phi, scale = x.record.add("features", (x,), outputs, weights, {"function": function, **numbers})
    return phi, scale


def _check(fits: bool, why: str) -> None:
    if not fits:
        raise ProgramError(why + ".")


def _three(kind: str, q: Register, k: Register, v: Register) -> str:
    return f"{kind} of queries {q.heads} × {q.width}, keys {k.heads} × {k.width} and values {v.heads} × {v.width}"


def _some(**weights: Tensor | None) -> dict[str, Tensor]:
    return {name: x for name, x in weights.items() if x is not None}

"""A call of linear attention, what it gives and what comes back: the records that every backend takes and returns."""

from typing import Any, NamedTuple

from torch import Tensor

from tarnn.kernels.records import WithHeads


class LinearFields(NamedTuple):
    """Queries (b, h, t, d), keys (b, g, s, d), values (b, m, s, e), and all that says what to do with them.

    Features are `function` (`kernels.features`) of x, or with Ω of factor·Ω x + β − square·|x|² + offset, plus shift.
    Either m = g, and h/g query heads share a key/value head; or h = g, and m/g heads of values share queries and keys.
    There is a state for each head of values. n: rows of the batch, or the sequences that are packed into one row.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None = None  # (b, m, s) or (b, m, s, f)
    key_log_weight: Tensor | None = None  # (b, m, s)
    S: Tensor | None = None  # (n, m, f, e)  the state before
    z: Tensor | None = None  # (n, m, f)
    omega: Tensor | None = None  # (1 or b, 1 or m, f, d)
    bias: Tensor | None = None  # (1 or b, 1 or m, f)
    # so far as `Gradients` goes
    M: Tensor | None = None  # (n, m)
    key_mask: Tensor | None = None  # (b, s)  bool
    cu_seqlens: Tensor | None = None  # (n + 1,)
    function: str = "identity"
    causal: bool = True
    normalize: bool = True
    eps: float = 0.0
    factor: float = 1.0
    square: float = 0.0
    offset: float = 0.0
    shift: float = 0.0
    at_least_one: bool = False  # normalised by max(|denominator|, 1), in true units and without eps


class Outputs(NamedTuple):
    """Results of a call. The denominators are for `backward` alone, in units of e^M, as the sums are."""

    o: Tensor  # (b, max(h, m), t, e)
    den: Tensor | None  # (b, max(h, m), t)
    S: Any  # (n, m, f, e)  the state after the call; with z and M None unless requested
    z: Any  # (n, m, f)
    M: Any  # (n, m)  zeros where nothing has a log-weight; a step without log-weights has None
    kept: Tensor | None = None  # states that a backend keeps for its own `backward`, as it likes, or None


class BackwardInputs(NamedTuple):
    """Inputs of `backward` beside the call: gradients of its outputs, and the outputs that it kept for this."""

    grad_o: Tensor
    grad_S: Tensor | None
    grad_z: Tensor | None
    o: Tensor
    den: Tensor
    # the state that all queries read, where not causal
    S_behind: Tensor | None
    z_behind: Tensor | None
    M_behind: Tensor | None
    kept: Tensor | None  # as in the outputs
    wants_projection: bool  # whether the gradients of Ω and β are wanted

    @classmethod
    def of(
        cls, call: Any, outputs: Outputs, grad_o: Tensor, grad_S: Tensor | None = None, grad_z: Tensor | None = None
    ) -> "BackwardInputs":
        """These gradients of a call's outputs, with what it kept of them; gradients of all that it was given are wanted."""
        S, z, M = (None, None, None) if call.causal else (outputs.S, outputs.z, outputs.M)
        projected = call.omega is not None
        assert outputs.den is not None, "a forward pass for backward gives denominators"
        return cls(grad_o, grad_S, grad_z, outputs.o, outputs.den, S, z, M, outputs.kept, projected)


class Gradients(NamedTuple):
    """A tensor for each of the first fields of a call; None for those that it doesn't have, or that nobody wants."""

    q: Any
    k: Any
    v: Any
    log_decay: Any
    key_log_weight: Any
    S: Any
    z: Any
    omega: Any
    bias: Any

    def of(self, call: Any) -> "Gradients":
        """Each in the dtype of the input that it is the gradient of: those of small inputs were made in the wide one."""
        pairs = zip(self, call.differentiable)
        return Gradients(*[g if g is None or x is None or g.dtype == x.dtype else g.to(x.dtype) for g, x in pairs])

    def wanted(self, call: Any) -> tuple[Any, ...]:
        """None for what the call doesn't have."""
        return tuple([None if x is None else g for g, x in zip(self, call.differentiable)])


class Call(WithHeads, LinearFields):
    __slots__ = ()
    outputs, gradients = Outputs, Gradients
    in_time = ("q", "k", "v", "log_decay", "key_log_weight")
    per_sequence = ("S", "z", "M")
    small = ("log_decay", "key_log_weight", "omega", "bias")

    @property
    def weighted(self) -> bool:
        """Whether keys have log-weights, so that the state has a maximum M."""
        return self.key_log_weight is not None or self.M is not None or self.function == "exp"

    @property
    def num_features(self) -> int:
        return self.k.shape[3] if self.omega is None else self.omega.shape[2]

    @property
    def values_per_key(self) -> int:
        """How many heads of values share their queries and keys."""
        return self.v.shape[1] // self.k.shape[1] if self.k.shape[1] else 1

    def for_values(self, x: Tensor) -> Tensor:
        """Some queries or keys with a head for each of values, where there are more of these."""
        return x.repeat_interleave(self.values_per_key, 1) if self.values_per_key > 1 else x

    @property
    def num_heads(self) -> int:
        """Heads of the output."""
        return self.q.shape[1] * self.values_per_key

    @property
    def differentiable(self) -> tuple[Any, ...]:
        """The fields that have a gradient, as `Gradients` names them."""
        return self[: len(Gradients._fields)]

    def new_state(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return S, z and M to write into."""
        n, g, f, e = self.num_sequences, self.v.shape[1], self.num_features, self.v.shape[3]
        S = self.q.new_empty(n, g, f, e, dtype=self.dtype)
        return S, S.new_empty(n, g, f), S.new_empty(n, g)

    def new_outputs(self, *, den: bool = True, state: bool = True) -> Outputs:
        """Return outputs to write into, None for what isn't wanted: o in the layout of q, others contiguous."""
        (b, _, t, _), h = self.q.shape, self.num_heads
        sums = self.q.new_empty((b, h, t), dtype=self.dtype) if den else None
        return Outputs(self.new_o(), sums, *(self.new_state() if state else (None, None, None)))

    def new_gradients(self, returned: Any = None) -> Gradients:
        """Return gradients to write into, as of all calls; those of Ω and β are zeros to add to, None if not wanted."""
        gradients = super().new_gradients()
        omega = bias = None
        if returned is None or returned.wants_projection:
            omega, bias = (None if x is None else x.zero_() for x in (gradients.omega, gradients.bias))
        if not self.q.shape[1]:  # without queries nobody writes them
            for x in (gradients.log_decay, gradients.key_log_weight):
                if x is not None:
                    x.zero_()
        return gradients._replace(omega=omega, bias=bias)

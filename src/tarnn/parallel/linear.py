"""Linear attention of sequences that several ranks share, each with a stretch of them.

A rank computes the state after its stretch alone, S, z and M, and the sum D of its log-decays. All ranks gather these, which
are as large for any length. Each folds those before its own (`_folded`), and the op goes on from there as from any state.
Without causality all ranks read one state, the sum of all. Autograd differentiates this as it stands.

Of packed sequences, one at most goes on from a rank to the next: ranks gather the states after their last ones.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tarnn.feature_maps.base import FeatureMap
from tarnn.numerics import autocast, finite
from tarnn.ops.checks import check_attention
from tarnn.ops.linear.arguments import PreparedCall, check_sums, make_call, with_log_weights
from tarnn.ops.linear.op import attend
from tarnn.ops.states import LinearState
from tarnn.parallel.collectives import add, gather, largest, tied
from tarnn.parallel.group import Ranks
from tarnn.parallel.stretch import Stretch


class Arguments(NamedTuple):
    """Arguments of `make_call`, in its order."""

    q: Tensor
    k: Tensor
    v: Tensor
    feature_map: FeatureMap | nn.Module | str
    causal: bool
    normalize: bool | str
    eps: float | None
    key_mask: Tensor | None
    cu_seqlens: Tensor | None  # of whole sequences
    log_decay: Tensor | None
    key_log_weight: Tensor | None
    state: LinearState | None


class _Ends(NamedTuple):
    """The states after each of p stretches alone, and the log-decay that each applies to the state before it."""

    S: Tensor  # (p, n, g, f, e)
    z: Tensor  # (p, n, g, f)
    M: Tensor | None = None  # (p, n, g) or (p, n, g, f)
    decay: Tensor | None = None  # (p, n, g, 1 or f)  the sums of log-decays

    def some(self, start: int, stop: int) -> "_Ends":
        M, decay = (None if x is None else x[start:stop] for x in (self.M, self.decay))
        return _Ends(self.S[start:stop], self.z[start:stop], M, decay)


_IN_TIME = ("k", "q", "v", "log_decay", "key_log_weight")


def compute_attention(
    ranks: Ranks,
    whole: Callable,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feature_map: Any,
    options: tuple[Any, ...],
    return_state: bool,
) -> Any:
    """Compute `linear_attention` of this rank's stretch: o, or (o, the state after the last rank's)."""
    given = Arguments(q, k, v, feature_map, *options)
    q, k, v = autocast(given.q, given.k, given.v)
    given = given._replace(q=q, k=k, v=v)
    stretch = _Stretch(ranks, given, return_state)
    o, state = (stretch.causal if given.causal else stretch.full)(return_state)
    return (o, state) if return_state else o


class _Stretch:
    def __init__(self, ranks: Ranks, given: Arguments, return_state: bool):
        self.ranks, self.given = ranks, given
        self.stretch = _agreed(ranks, given, return_state)
        self.layout, self.cuts, self.sequences = self.stretch.layout, self.stretch.cuts, self.stretch.here
        self.here = given._replace(cu_seqlens=self.stretch.local_bounds(given.cu_seqlens), state=None)
        self.made = make_call(*self.here)
        self.before = self._given_state()

    # --- causal

    def causal(self, return_state: bool) -> tuple[Tensor, LinearState | None]:
        stretch, packed = self.stretch, self.cuts is not None
        before = self.before.select(self._rows(self.sequences)) if packed else self.before
        if stretch.is_shared:
            made, here = self.made, self.here
            if packed:
                last = stretch.last_tokens
                made, here = self._changed(lambda x: _part(x, last)), _part(here, last)
            ends = self._ends(made, here)
            before = _tied(before, ends)
            first, rank = self._rows([0]), self.ranks.rank
            # also of no rank: exchanges of the backward pass have one order on all of them
            some = ends.some(rank if stretch.since is None else stretch.since, rank)
            rest = _folded(before.select(first) if packed else before, some)
            before = before.insert(first, rest) if packed else rest
        o, state = self._run(self._continued(before), return_state and packed)
        if state is None:
            return o, _folded(self.before, ends) if return_state else None
        pairs = zip((state.S, state.z, state.M), (self.before.S, self.before.z, self.before.M))
        whole: list[Any] = [None if x is None else stretch.everywhere(x, initial) for x, initial in pairs]
        S, z, M = whole
        return tied(tied(o, S), z), LinearState(S, z, M)

    def _ends(self, made: PreparedCall, given: Arguments) -> _Ends:
        """Gather the states after each rank's keys alone."""
        state = self._behind(made)
        decay = _total_decay(given.log_decay, given.v, given.key_mask, state.S.dtype)
        return _Ends(*gather(self.ranks, state.S, state.z, None if state.M is None else state.M, decay))

    # --- both sides

    def full(self, return_state: bool) -> tuple[Tensor, LinearState | None]:
        state, cuts = self._behind(self.made), self.cuts
        if cuts is None:
            state = self._added(self.before, state)
            return self._run(self._changed(lambda x: _from(_without_keys(x), state)), False)[0], state
        here, shared = self.sequences, list(range(len(cuts) - 1)) if return_state else self.layout.shared(cuts)
        mine = _sum(self.before.select(self._rows(here)), state)
        if shared:
            both = [i for i in here if i in shared]
            part = _nothing_like(self.before.select(self._rows(shared)))
            part = part.insert(self._rows(map(shared.index, both)), state.select(self._rows(map(here.index, both))))
            whole = self._added(self.before.select(self._rows(shared)), part)
            mine = mine.insert(self._rows(map(here.index, both)), whole.select(self._rows(map(shared.index, both))))
            mine = LinearState(tied(mine.S, whole.S), mine.z, mine.M)
        # packed keys lie where queries do: they are in the states already, and masked here
        masked = torch.zeros(self.here.k.shape[0], self.here.k.shape[2], dtype=torch.bool, device=self.here.k.device)
        o, _ = self._run(self._changed(lambda x: _from(x._replace(key_mask=masked), mine)), False)
        return o, whole if return_state else None

    def _added(self, before: LinearState, state: LinearState) -> LinearState:
        """Add the sums of all ranks to a state."""
        if state.M is None:
            S, z = add(self.ranks, state.S, state.z)
            return _sum(before, LinearState(S, z))
        M = largest(self.ranks, state.M)
        S, z = add(self.ranks, *_in_units(state, M))
        return _sum(before, LinearState(S, z, M))

    # --- calls

    def _behind(self, made: PreparedCall) -> LinearState:
        """Compute the state after a call's keys alone; with maxima wherever there are some to go on from."""
        call = made.call
        q, k = call.q.detach(), call.for_values(call.k)
        # without query heads: the kernels then make states alone
        state = made.state_of(attend(call._replace(q=q[:, :0], k=k), with_state=True))
        if state.M is None and self.before.M is not None:
            return LinearState(state.S, state.z, torch.zeros_like(self.before.M[: len(state.z)]))
        return state

    def _changed(self, change: Callable[[Any], Any]) -> PreparedCall:
        """Change tensors of the call. Features in units of maxima, which depend on all keys, are made again."""
        if self.made.M is None:
            return self.made._replace(call=change(self.made.call))
        return make_call(*change(self.here))

    def _continued(self, before: LinearState) -> PreparedCall:
        return self._changed(lambda x: _from(x, before))

    def _run(self, made: PreparedCall, return_state: bool) -> tuple[Tensor, LinearState | None]:
        outputs = attend(made.call, with_state=return_state)
        o = with_log_weights(outputs.o, made.log_weight)
        return o, made.state_of(outputs) if return_state else None

    # --- states

    def _given_state(self) -> LinearState:
        """Return the given state, checked, or one that has seen nothing; with a row for each whole sequence."""
        call, state = self.made.call, self.given.state
        n = call.k.shape[0] if self.cuts is None else len(self.cuts) - 1
        (g, e), f, by_feature = (call.v.shape[1], call.v.shape[3]), call.num_features, self.made.M is not None
        weighted = call.weighted or by_feature or (state is not None and state.M is not None)
        if state is None:
            options = {"log_weights": weighted, "log_features": by_feature}
            return LinearState.zeros(n, g, f, e, dtype=call.dtype, device=call.k.device, **options)
        check_sums((n, g, f, e), call.k, state.S, state.z, state.M, by_feature=by_feature)
        if not weighted:
            return state
        M = state.z.new_zeros(n, g) if state.M is None else state.M
        return LinearState(state.S, state.z, M[..., None].expand_as(state.z) if by_feature and M.ndim == 2 else M)

    def _rows(self, rows: Iterable[int]) -> Tensor:
        return torch.tensor(list(rows), dtype=torch.int64, device=self.given.k.device)


def _agreed(ranks: Ranks, given: Arguments, return_state: bool) -> Stretch:
    """Make this rank's part. Raises UserError on all ranks if one's arguments are of another kind than the others'."""
    options = (given.key_mask, given.cu_seqlens, given.log_decay, given.key_log_weight)
    check_attention(given.q, given.k, given.v, given.causal, *options, grouped_values=True)
    if given.state is not None and not isinstance(given.state, LinearState):
        raise ValueError(f"state must be a LinearState(S, z, M); got {type(given.state).__name__}.")
    phi = given.feature_map if isinstance(given.feature_map, str) else repr(given.feature_map)
    more = {"feature_map": phi, "state": repr(given.state), "return_state": return_state}
    return Stretch.of(ranks, "linear_attention", given, _IN_TIME, axis=2, **more)


# --- of a call, or of the arguments that it is made from


def _from(x: Any, state: LinearState) -> Any:
    """Continue from a state."""
    if isinstance(x, Arguments):
        return x._replace(state=state)
    return x._replace(S=state.S, z=state.z, M=state.M)


def _part(x: Any, part: slice) -> Any:
    """Cut to some positions, of one sequence."""
    cut = {name: y[:, :, part] for name in ("q", "k", "v", "key_log_weight") if (y := getattr(x, name)) is not None}
    decay, mask = x.log_decay, x.key_mask
    decay = decay if decay is None or decay.ndim == 1 else decay[:, :, part]
    return x._replace(**cut, log_decay=decay, key_mask=None if mask is None else mask[:, part], cu_seqlens=None)


def _without_keys(x: Any) -> Any:
    return x._replace(k=x.k[:, :, :0], v=x.v[:, :, :0], key_mask=None, key_log_weight=None)


def _tied(state: LinearState, ends: _Ends) -> LinearState:
    """Let the backward pass of a state take part in the exchange of ends, whatever is used of them."""
    return LinearState(tied(state.S, ends.S), state.z, state.M)


def _in_units(state: LinearState, M: Tensor) -> tuple[Tensor, Tensor]:
    """Return S and z in units of e^M."""
    assert state.M is not None
    keep = (state.M - finite(M)).exp()
    keep = keep if keep.ndim == 3 else keep[..., None]
    return state.S * keep[..., None], state.z * keep


def _sum(first: LinearState, second: LinearState) -> LinearState:
    """Return the state of all keys that two states have seen."""
    if first.M is None or second.M is None:
        return LinearState(first.S + second.S, first.z + second.z)
    M = torch.maximum(first.M, second.M)
    (S, z), (more_S, more_z) = _in_units(first, M), _in_units(second, M)
    return LinearState(S + more_S, z + more_z, M)


def _nothing_like(state: LinearState) -> LinearState:
    M = None if state.M is None else torch.full_like(state.M, -torch.inf)
    return LinearState(torch.zeros_like(state.S), torch.zeros_like(state.z), M)


# --- states of stretches that follow one another


def _folded(before: LinearState, ends: _Ends) -> LinearState:
    """Return the state after p stretches that follow one another and a state; its M is None if theirs is:

        S = Σ_j e^(M_j + D_j − M) S_j      D_j: log-decays of all stretches behind j, summed;  M = max_j (M_j + D_j)

    M is a constant under autograd, as everywhere: it cancels.
    """
    S, z = torch.cat([before.S[None], ends.S]), torch.cat([before.z[None], ends.z])
    weight = None
    if ends.decay is not None:  # summed from the end, never a difference: −∞ costs no digits
        behind = ends.decay.flip(0).cumsum(0).flip(0)
        weight = torch.cat([behind, torch.zeros_like(before.z[None, ..., : behind.shape[-1]])])  # (p + 1, n, g, x)
    M = None
    if ends.M is not None and before.M is not None:
        maxima = torch.cat([before.M[None], ends.M]).detach()
        by_feature = maxima.ndim == 4
        maxima = maxima if by_feature else maxima[..., None]
        weight = maxima if weight is None else maxima + weight
        most = weight.detach().amax(0)  # (n, g, x)
        M = most if by_feature else most.amax(-1)  # channels that decay apart share one
        weight = weight - finite(M if by_feature else M[..., None])
    if weight is not None:
        weight = weight.exp()
        S, z = S * weight[..., None], z * weight
    return LinearState(S.sum(0), z.sum(0), M)


def _total_decay(log_decay: Tensor | None, v: Tensor, key_mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Sum the log-decays (g,), (b, g, s) or (b, g, s, f) over values v (b, g, s, e): (b, g, 1 or f). At masked keys
    no time passes."""
    if log_decay is None:
        return None
    log_decay = log_decay.to(dtype)
    if log_decay.ndim == 1:
        log_decay = log_decay[None, :, None].expand(v.shape[:3])
    if log_decay.ndim == 3:
        log_decay = log_decay[..., None]
    if key_mask is not None:
        log_decay = log_decay.masked_fill(~key_mask[:, None, :, None], 0.0)
    return log_decay.sum(2)

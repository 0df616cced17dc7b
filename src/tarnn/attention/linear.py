"""Linear attention as a module: projections, a feature map, and the op."""

from collections.abc import Callable
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tarnn.attention.decay import ChannelDecay
from tarnn.attention.multihead import MultiHeadAttention
from tarnn.attention.registry import register
from tarnn.attention.rotary import Rotary, Rotation, positions_in
from tarnn.feature_maps.base import FeatureMap, PositionalMap
from tarnn.feature_maps.by_name import as_feature_map
from tarnn.feature_maps.elementwise import Identity
from tarnn.feature_maps.statistics import FittedMap
from tarnn.numerics import full_precision, wide, widen
from tarnn.ops import LinearState, linear_attention, step
from tarnn.ops.features import features

_IDENTITY = Identity()


@register("linear")
class LinearAttention(MultiHeadAttention):
    """Multi-head attention whose weights are φ(q_i)·φ(k_j): trained in O(t), run with a state of fixed size.

        o_i = φ(q_i)ᵀ Σ_j φ(k_j) v_jᵀ / φ(q_i)ᵀ Σ_j φ(k_j)          (no 1/√d anywhere)

    Katharopoulos et al. 2020, eq. 4–12 (arXiv 2006.16236). Arguments beyond `MultiHeadAttention`'s:

    feature_map: φ, a `FeatureMap`, the name of one (`tarnn.feature_maps.names()`), or any module (…, d) → (…, f).
    normalize: divide by the sum of the weights. If not, each head's output goes through an RMSNorm instead,
        whose gradient is bounded where the division's is not (TransNormer, arXiv 2210.10340). Maps with
        negative products need normalize=False.
    decay: a module x → log_decay (`tarnn.attention.decay`). decay_back: another, for the keys after a query: attention to both
        sides has both or none.
    rotary: a `Rotary`. Where φ(q)·φ(k) is a function of q·k (features of softmax's kernel, Taylor's), q and k
        are rotated, before φ, as in softmax attention; it is as wide as they are. Else it is as wide as the
        features, which are rotated after φ. With normalize, in the numerator only, so that the sum of the
        weights stays positive (RoFormer, eq. 19, arXiv 2104.09864):
            o_i = Σ_j (R_i φ(q_i))·(R_j φ(k_j)) v_j / Σ_j φ(q_i)·φ(k_j)
        Then the state's S holds rotated features, its z plain ones, and sums are float32 even in autocast.
        Rotated weights need not be small where plain ones are, so take a map whose features don't vanish (Elu)
        or normalize=False: with sparse features (Relu, Dpfp) the fraction can become very large.

    A map that is fitted by the call (`fit="call"`) computes its parameters in each forward, so it has no state to
    continue from. For a map that is calibrated, see `tarnn.attention.calibrating`.

    Raises ValueError for combinations that have no meaning, with the reason.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        causal: bool,
        feature_map: FeatureMap | nn.Module | str = "elu",
        normalize: bool = True,
        decay: nn.Module | None = None,
        decay_back: nn.Module | None = None,
        rotary: Rotary | None = None,
        **options: Any,
    ):
        super().__init__(hidden_size, num_heads, causal=causal, **options)
        phi = as_feature_map(feature_map, head_dim=self.head_dim, num_heads=self.num_kv_heads)
        if normalize:
            phi.check_positive(self.head_dim)
        self.rotates_inputs, vectors = phi.dot_product, "q and k" if phi.dot_product else "features"
        self.set_rotary(rotary, self.rotary_dim(self.head_dim, phi), vectors)
        _check_choices(phi, causal, decay, decay_back, rotary, self.context_size)
        self.feature_map, self.normalize, self.decay, self.decay_back = phi, normalize, decay, decay_back
        self.num_features = phi.num_features(self.head_dim)
        self.fits_by_call = isinstance(phi, FittedMap) and phi.fit == "call"
        self.calibration: Any = None  # while `calibrating`: what observes q and k
        self.o_norm = None if normalize else nn.RMSNorm(self.head_dim, eps=1e-6)

    @classmethod
    def rotary_dim(cls, head_dim: int, feature_map: FeatureMap | None = None) -> int:
        """The width of q and k, or of the features if these are rotated."""
        if feature_map is None or feature_map.dot_product:
            return head_dim
        return feature_map.num_features(head_dim)

    def mix(
        self,
        x: Float[Tensor, "b t hidden"],
        q: Float[Tensor, "b h t d"],
        k: Float[Tensor, "b g s d"],
        v: Float[Tensor, "b g s e"],
        *,
        key_mask: Bool[Tensor, "b s"] | None,
        cu_seqlens: Int[Tensor, " n_plus_1"] | None,
        positions: Int[Tensor, "#b t"] | None,
        rotation: Rotation | None,
        state: LinearState | None,
        return_state: bool,
        inplace: bool,
    ) -> tuple[Any, ...]:
        """A state of sums is small, so a new one is made with `inplace` as well."""
        unplaced = positions is None and rotation is None and state is None
        if unplaced and self.rotary is not None and self.rotates_inputs:
            # with one fixed draw of ω the weights depend on absolute positions too; averaged over draws they do not
            positions = positions_in(key_mask, cu_seqlens, 0, x.shape[1], x.device)
        q, k, rotation, phi = self._apply_positions(q, k, positions, rotation, x, state)
        masks = {"query_mask": key_mask if self.context_size is None else None, "key_mask": key_mask}
        if self.calibration is not None:
            self.calibration.observe(q, k, **masks)
        if self.fits_by_call:
            self._check_no_state(state, return_state)
            phi = cast(FittedMap, phi).fitted(q, k, cu_seqlens=cu_seqlens, **masks)
        with_state = return_state or rotation is not None  # the plain weights of rotated features are in its z
        outputs = self._attend(
            linear_attention,
            q,
            k,
            v,
            phi,
            rotation,
            causal=self.causal,
            key_mask=key_mask,
            cu_seqlens=cu_seqlens,
            **self._log_decays(x),
            state=state,
            return_state=with_state,
        )
        o, *after = outputs if with_state else (outputs,)
        return (o, *after) if return_state else (o,)

    def mix_token(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: LinearState, *, positions, rotation, inplace: bool
    ) -> tuple[Tensor, LinearState]:
        q, k, rotation, phi = self._apply_positions(q, k, positions, rotation, x, state)
        return self._attend(step, q, k, v, phi, rotation, state=state, **self._log_decays(x), inplace=inplace)

    def new_state(self, batch_size: int, *, capacity: int | None = None, dtype=None, device=None) -> LinearState:
        """The state before the first token. Its size does not depend on `capacity`; it is float32, or float64
        for that `dtype` (by default the weights')."""
        weight = self.v_proj.weight
        return LinearState.zeros(
            batch_size,
            self.num_kv_heads,
            self.num_features,
            self.head_dim,
            dtype=wide(weight.dtype if dtype is None else dtype),
            device=weight.device if device is None else device,
            log_weights=self.feature_map.log_scaled,
            log_features=self.feature_map.log_features,
        )

    def _apply_positions(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor | None,
        rotation: Rotation | None,
        x: Tensor,
        state: LinearState | None,
    ) -> tuple[Tensor, Tensor, Rotation | None, FeatureMap]:
        """Apply positions to q, k or φ: (q, k, the rotation that features still need, φ at these positions)."""
        phi = self.feature_map
        if isinstance(phi, PositionalMap):
            if positions is None:
                if state is not None:
                    raise ValueError(
                        f"with {type(phi).__name__} a continued sequence (state=) needs positions=, "
                        "(b, t): the state does not know how many tokens it has seen."
                    )
                positions = positions_in(None, None, 0, x.shape[1], x.device)[0]
            return q, k, None, phi.at(positions)
        rotation = None if self.rotary is None else self.rotary.of(positions, rotation, x, state)
        if rotation is not None and self.rotates_inputs:
            q, k, rotation = rotation.apply(q), rotation.apply(k), None
        return q, k, rotation, phi

    def _check_no_state(self, state, return_state: bool) -> None:
        if state is not None or return_state:
            raise ValueError(
                f"{type(self.feature_map).__name__} is fitted by the call, so what one call leaves behind fits no "
                'other: no state=, no return_state=True and no step. Make the map with fit="calibrated" for these.'
            )

    def _log_decays(self, x: Tensor) -> dict[str, Tensor | None]:
        """Arguments of the op; a step has no decay of what comes later."""
        decays = {"log_decay": None if self.decay is None else self.decay(x)}
        return decays if self.decay_back is None else decays | {"log_decay_back": self.decay_back(x)}

    def _attend(self, op: Callable, q, k, v, phi, rotation: Rotation | None, **options) -> Any:
        """Call `op`, linear_attention or step; if there is a rotation, rotate the features."""
        if rotation is None and (self.normalize or q.dtype != torch.float16):
            return op(q, k, v, phi, normalize=self.normalize, **options)
        with full_precision(q):  # undivided sums grow with t, in fp16 to infinity
            q, k, v = widen(q), widen(k), widen(v)
            if rotation is None:
                return op(q, k, v, phi, normalize=False, **options)
            phi_q, phi_k = features(phi, q, "queries")[0], features(phi, k, "keys")[0]
            if self.normalize:
                return _fraction(op, phi_q, phi_k, v, rotation, **options)
            return op(rotation.apply(phi_q), rotation.apply(phi_k), v, _IDENTITY, normalize=False, **options)

    def extra_repr(self) -> str:
        rotary = "" if self.rotary is None else f", rotary={self.rotary!r}"
        return f"{super().extra_repr()}, normalize={self.normalize}{rotary}"


def _fraction(op, phi_q, phi_k, v, rotation: Rotation, state: LinearState | None, **options):
    """Divide Σ (rotated weights) v by Σ plain weights. In the state, S holds rotated features, z plain ones."""
    above = None if state is None else LinearState(state.S, torch.zeros_like(state.z))
    q, k = rotation.apply(phi_q), rotation.apply(phi_k)
    num, above = op(q, k, v, _IDENTITY, normalize=False, state=above, **options)
    if op is step and state is not None:
        den, z = _step_of_weights(phi_q, phi_k, state.z, **options)
    else:
        below = None if state is None else LinearState(state.z[..., None], torch.zeros_like(state.z))
        den, below = op(phi_q, phi_k, torch.ones_like(v[..., :1]), _IDENTITY, normalize=False, state=below, **options)
        z = below.S[..., 0]
    # where no key was seen, or none with a feature in common: o = 0, and gradients of 0
    return num / den.masked_fill(den == 0, torch.inf), LinearState(above.S, z)


def _step_of_weights(phi_q, phi_k, z, log_decay, inplace) -> tuple[Tensor, Tensor]:
    """Return φ(q)·z, (b, h, 1, 1), and z ← e^log_decay z + φ(k): `step` with v = 1, in fewer calls."""
    if log_decay is not None:  # (g,) or (b, g, 1)
        keep = log_decay.to(z.dtype).exp().reshape(-1, z.shape[1], 1)
        z = z.mul_(keep) if inplace else z * keep
    z = z.add_(phi_k.squeeze(2)) if inplace else z + phi_k.squeeze(2)
    weights = phi_q.unflatten(1, (z.shape[1], -1)) * z[:, :, None, None]  # (b, g, r, 1, f)
    return weights.sum(-1, keepdim=True).flatten(1, 2), z


def _check_choices(
    feature_map: FeatureMap,
    causal: bool,
    decay: nn.Module | None,
    decay_back: nn.Module | None,
    rotary: Rotary | None,
    context_size: int | None,
) -> None:
    name = feature_map._get_name()
    if causal and decay_back is not None:
        raise ValueError("decay_back fades later tokens, which causal attention does not see; leave it out.")
    if not causal and (decay is None) != (decay_back is None):
        raise ValueError(
            "attention to both sides takes two decays, decay for the keys before a query and decay_back for those after it; "
            "got one. Pass both, or causal=True."
        )
    if context_size is not None and decay is not None:
        raise ValueError("a decay runs along time, which a context does not share with its queries; got context_size=.")
    if causal and isinstance(feature_map, FittedMap) and feature_map.fit == "call":
        raise ValueError(
            f"{name} is fitted by the call, whose later keys causal attention may not know; make it with "
            'fit="calibrated" and calibrate it (tarnn.attention.calibrating).'
        )
    if isinstance(feature_map, PositionalMap) and (rotary is not None or context_size is not None):
        reason = "cross attention has none" if rotary is None else "it takes no rotary positions as well"
        raise ValueError(f"{name} weighs keys by their distance; {reason}.")
    if rotary is None or feature_map.dot_product:
        return
    if decay_back is not None:
        raise ValueError(
            f"rotary positions rotate features of {name} in sums that are continued from states, and attention that fades to "
            "both sides has none; a decay knows the order: take no rotary positions."
        )
    if feature_map.log_scaled:
        raise ValueError(
            f"rotary positions rotate features, and those of {name} are kept as scaled logarithms; "
            "take another map (Elu, Relu, Dpfp …) or no rotary positions."
        )
    if isinstance(decay, ChannelDecay):
        raise ValueError(
            "rotary positions mix pairs of features that a channel decay lets fade apart, so distance would "
            "no longer be what counts; take a decay per head or per token, or no rotary positions."
        )

"""The launches of a backward pass."""

from typing import Any

import torch
import triton
from torch import Tensor

from tarnn.kernels.linear import Call, Gradients, Returned
from tarnn.kernels.triton import backward_kernels
from tarnn.kernels.triton.arguments import Rows, Spec
from tarnn.kernels.triton.configurations import CHUNK_WITH_CHANNELS, padded
from tarnn.kernels.triton.launch import PLAIN, ROWS, Launches
from tarnn.kernels.triton.split_backward import parts_of

FEW_VALUES = 32  # of a state before and of one behind, which `decay_gradients` holds at once


def backward(call: Call, returned: Returned) -> Gradients:
    grads = call.new_gradients(returned)
    parts = parts_of(call, CHUNK_WITH_CHANNELS)
    if len(parts) == 1:
        return Backward(call, returned, grads).run().of(call)
    if parts[0].e.stop < call.v.shape[3]:  # those of q and k are sums
        grads = Gradients(*(x if x is None else x.to(torch.float32) for x in grads))
    for x in grads:
        if x is not None:
            x.zero_()
    for part in parts:
        mine, given = part.call(call), part.returned(returned)
        part.add(grads, Backward(mine, given, mine.new_gradients(given)).run())
    return grads.of(call)


class Backward:
    """The launches of a backward pass. A decay's gradient wants the states at both ends of each chunk, so there an item is
    a chunk; otherwise nothing of a chunk's size is in memory."""

    def __init__(self, call: Call, returned: Returned, grads: Gradients, make: type[Launches] = Launches):
        self.call, self.returned, self.grads = call, returned, grads
        self.launches = launches = make(call, backward=True)
        b, h, t, *_ = launches.sizes
        launches.values |= {"grad_o": Rows.read(returned.grad_o), "T": t}
        launches.values |= {"r": launches.wide(b, h, t), "gz": launches.wide(b, h, t)}
        self.values = launches.values
        self.alone = call.causal and launches.of_keys.whole and call.log_decay is None
        self.projected = call.omega is not None

    def run(self) -> Gradients:
        launches, plan, (_, h, *_) = self.launches, self.launches.of_queries, self.launches.sizes
        if self.call.weighted and not self.call.causal:
            self.values["M_end"] = self.returned.M_behind
        launches.run(
            backward_kernels.gradient_rows,
            (plan.num_chunks, h),
            o=Rows.read(self.returned.o),
            den=self.returned.den.contiguous(),
            chunks=plan.chunks,
            spec=launches.spec._replace(BE=min(padded(launches.spec.E), ROWS)),
            **PLAIN,
        )
        before, kept = self._before()
        behind = self._behind(kept)
        grad_q, grad_k = self._queries(before), self._keys(behind)
        self._values(behind)
        if self.call.log_decay is not None:
            self._decays(before, behind)
        if self.projected:
            self._projection(grad_q, grad_k)
        return self.grads

    def _before(self) -> tuple[dict[str, Any], Tensor | None]:
        """The states that queries read."""
        if not self.call.causal:
            return {"S_in": self.returned.S_behind, "z_in": self.returned.z_behind, "GIVEN": 1}, None
        if self.alone:
            return self.launches.state(), None
        return self.launches.states_before(self.call.new_state()[:2])

    def _behind(self, kept: Tensor | None) -> dict[str, Any]:
        """The gradients of the states that keys enter, and where they come from one more item, of the state before all."""
        call, launches, grads = self.call, self.launches, self.grads
        given: tuple[Any, Any] = (self.returned.grad_S, self.returned.grad_z)
        if given != (None, None):
            wide = (torch.zeros_like(grads.S) if given[0] is None else given[0]).to(torch.float32)
            flat = (torch.zeros_like(grads.z) if given[1] is None else given[1]).to(torch.float32)
            given = wide.contiguous(), flat.contiguous()
        if self.alone:
            there = given[0] is not None
            S, z = given if there else (self.launches.nothing, self.launches.nothing)
            return {"S_behind": S, "z_behind": z, "GIVEN": int(there)}
        plan, (_, _, _, g, _, f, e) = launches.of_queries, launches.sizes
        S, z = launches.wide(plan.num_items, g, f, e), launches.wide(plan.num_items, g, f)
        launches.run(
            backward_kernels.gradient_sums,
            (plan.num_items, g, triton.cdiv(e, launches.spec.BE)),
            items=plan.items,
            S=S,
            z=z,
        )
        if call.causal:
            launches.prefix(plan, (S, z), given, (grads.S, grads.z), kept, reverse=True)
            return {"S_behind": S, "z_behind": z, "GIVEN": 1}
        total = torch.empty_like(grads.S), torch.empty_like(grads.z)
        launches.prefix(plan, (S, z), given, total, None, reverse=True)
        begin = self.values["begin"] if call.weighted else torch.ones_like(total[1][..., 0])
        grads.S.copy_(total[0] * begin[..., None, None])
        grads.z.copy_(total[1] * begin[..., None])
        return {"S_behind": total[0], "z_behind": total[1], "GIVEN": 1}

    def _tile(self, most: int = 2**31) -> Spec:
        """Of kernels that hold all values, or at most so many at once, and some features."""
        spec = self.launches.spec
        return spec._replace(BF=self.launches.config.backward_features, BE=min(padded(spec.E), most))

    def _target(self, grad: Tensor, like: Tensor) -> Tensor:
        """Where a kernel writes the gradient of rows: ∂/∂u of projected features is a tensor of its own."""
        if self.projected and like is not self.call.v:
            return self.launches.wide(*like.shape[:3], self.launches.spec.F)
        in_a_row = grad.stride(-1) == 1 or grad.shape[-1] == 1
        return grad if in_a_row else torch.empty_like(like, memory_format=torch.contiguous_format)

    def _queries(self, before: dict[str, Any]) -> Tensor:
        launches, plan, spec = self.launches, self.launches.of_queries, self._tile()
        dq = self._target(self.grads.q, self.call.q)
        grid = plan.num_items, launches.sizes[1], triton.cdiv(spec.F, spec.BF)
        launches.run(backward_kernels.query_gradients, grid, items=plan.items, dq=Rows.of(dq), spec=spec, **before)
        if dq is not self.grads.q and not self.projected:
            self.grads.q.copy_(dq)
        return dq

    def _keys(self, behind: dict[str, Any]) -> Tensor:
        launches, plan, spec = self.launches, self.launches.of_keys, self._tile()
        b, _, _, g, s, f, _ = launches.sizes
        blocks, weight = triton.cdiv(f, spec.BF), self.grads.key_log_weight
        dk = self._target(self.grads.k, self.call.k)
        dw = launches.wide(blocks, b, g, s) if weight is not None else dk
        launches.run(
            backward_kernels.key_gradients,
            (plan.num_items, g, blocks),
            items=plan.items,
            dk=Rows.of(dk),
            dw=dw,
            T=s,
            S_before=self.grads.S,
            z_before=self.grads.z,
            KEEP_STATE=int(self.alone),
            KEEP_WEIGHT=weight is not None,
            spec=spec,
            **behind,
        )
        if weight is not None:
            weight.copy_(dw.sum(0))
        if dk is not self.grads.k and not self.projected:
            self.grads.k.copy_(dk)
        return dk

    def _values(self, behind: dict[str, Any]) -> None:
        launches, plan = self.launches, self.launches.of_keys
        dv = self._target(self.grads.v, self.call.v)
        grid = plan.num_items, launches.sizes[3], triton.cdiv(launches.spec.E, launches.spec.BE)
        launches.run(
            backward_kernels.value_gradients, grid, items=plan.items, dv=Rows.of(dv), T=launches.sizes[4], **behind
        )
        if dv is not self.grads.v:
            self.grads.v.copy_(dv)

    def _decays(self, before: dict[str, Any], behind: dict[str, Any]) -> None:
        """Shares of heads and of blocks of features, then their sum."""
        launches, plan, spec = self.launches, self.launches.of_keys, self._tile(FEW_VALUES)
        b, h, t, g, _, f, _ = launches.sizes
        blocks = triton.cdiv(f, spec.BF)
        shape = (1, b, h, t, f) if self.call.has_channels else (blocks, b, h, t)
        shares = launches.wide(*shape)
        launches.run(
            backward_kernels.decay_gradients,
            (plan.num_items, h, blocks),
            items=plan.items,
            shares=shares,
            spec=spec,
            **behind | before,
        )
        self.grads.log_decay.copy_(shares.sum(0).unflatten(1, (g, h // g)).sum(2))

    def _projection(self, grad_q: Tensor, grad_k: Tensor) -> None:
        """From ∂/∂u (b, h, t, f) to those of x, Ω and β: u = factor·Ωx + β − square·|x|² + offset."""
        call, grads = self.call, self.grads
        omega: Any = call.omega
        g = call.k.shape[1]
        k = call.k if call.key_mask is None else call.k.masked_fill(~call.key_mask[:, None, :, None], 0.0)
        for x, grad_u, target in ((call.q, grad_q, grads.q), (k, grad_k, grads.k)):
            x, grad_u = (y.to(torch.float32).unflatten(1, (g, -1)) for y in (x, grad_u))  # (b, g, r, t, ·)
            grad = call.factor * (grad_u @ omega.to(torch.float32)[:, :, None])
            if call.square:
                grad = grad - 2 * call.square * grad_u.sum(-1, keepdim=True) * x
            target.copy_(grad.flatten(1, 2))
            if grads.omega is not None:
                products = (grad_u.mT @ x).sum(2)
                grads.omega.add_(call.factor * products.sum_to_size(grads.omega.shape))
            if grads.bias is not None:
                grads.bias.add_(grad_u.sum((2, 3)).sum_to_size(grads.bias.shape))

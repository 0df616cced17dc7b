"""The definition of hybrid attention (`hybrid`), token by token; `definition` has the whole of it."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tarnn.numerics import default_eps
from tarnn.program.hybrid import REACHES
from tarnn.program.row_wise import Call, features


def hybrid(call: Call, states: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor):
    """Compute the key heads of each reach by themselves. states: those of the reaches that there are, in their order."""
    reach = [int(x) for x in call.instruction.numbers["reach"]]  # type: ignore[union-attr]
    shared, out, after = q.shape[1] // len(reach), q.new_zeros(*q.shape[:2], v.shape[2]), list[Tensor]()
    for kind in sorted(set(reach)):
        heads = torch.tensor([i for i, x in enumerate(reach) if x == kind], device=q.device)
        mine = (heads[:, None] * shared + torch.arange(shared, device=q.device)).flatten()
        compute, n = (exact, 2) if REACHES[kind] == "exact" else (ring, 6)
        queries = q[:, mine].unflatten(1, (-1, shared))  # (t, g, r, d)
        o, new = compute(call, mine, states[len(after) : len(after) + n], queries, k[:, heads], v[:, heads])
        out[:, mine] = o.flatten(1, 2)
        after += new
    return (out,), tuple(after)


def exact(call: Call, mine: Tensor, states, q: Tensor, k: Tensor, v: Tensor):
    """Softmax over all keys."""
    past = states[0].shape[1]
    keys, values = (torch.cat([old, new.movedim(0, 1)], 1) for old, new in zip(states, (k, v), strict=True))
    scores = (call.number("scale") * query @ keys[:, : past + i + 1].mT for i, query in enumerate(q))
    outputs = [(weight.softmax(-1) @ values[:, : weight.shape[-1]])[None] for weight in scores]
    return torch.cat([v.new_zeros(0, *q.shape[1:3], v.shape[2]), *outputs]), (keys, values)


def ring(call: Call, mine: Tensor, states, q: Tensor, k: Tensor, v: Tensor):
    """Softmax over a ring of keys, and one part more for the sums over those that have left it."""
    keys, values, S, z, M, count = (x.clone() for x in states)
    sinks, until, room = int(call.number("sinks")), call.number("far_until"), keys.shape[1]
    outputs = [v.new_zeros(0, *q.shape[1:3], v.shape[2])]
    for i, query in enumerate(q):
        seen = int(count)
        place = seen if seen < sinks else sinks + (seen - sinks) % (room - sinks)
        far, of_far = q.new_full(query.shape[:2], -torch.inf), q.new_zeros(*query.shape[:2], v.shape[2])
        if z.shape[1] and seen >= room:
            S, z, M = joined(call, S, z, M, keys[:, place], values[:, place])
            if until < 0 or seen < until:
                far, of_far = seen_far(call, mine, S, z, M, query)
        keys[:, place], values[:, place], count = k[i], v[i], count + 1
        near = call.number("scale") * query @ keys[:, : seen + 1].mT
        weight = torch.cat([near, far[..., None]], -1).softmax(-1)
        outputs.append((weight[..., :-1] @ values[:, : seen + 1] + weight[..., -1:] * of_far)[None])
    return torch.cat(outputs), (keys, values, S, z, M, count)


def joined(call: Call, S: Tensor, z: Tensor, M: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums with a key more; they are in units of e^M, M the largest log-weight so far."""
    (phi,), (log_weight,) = features(of_side(call, "keys"), key[None])
    per_feature = M.ndim == 2
    log_weight = phi + log_weight if per_feature else log_weight[:, 0]
    after = torch.maximum(M, log_weight)
    keep, enter = (M - after).exp(), (log_weight - after).exp()
    keep, enter = (keep, enter) if per_feature else (keep[:, None], enter[:, None] * phi)
    return keep[..., None] * S + enter[..., None] * value[:, None], keep * z + enter, after


def seen_far(call: Call, mine: Tensor, S: Tensor, z: Tensor, M: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logarithm of all far keys' weight for each query (g, r, d), and their mean value; −∞ where φ underflow."""
    (phi,), (scale,) = features(of_side(call, "queries"), q.flatten(0, 1)[None])
    phi, scale = phi.view(*q.shape[:2], -1), scale.view(q.shape[:2])
    bias = call.weight("far_bias")
    scale = scale if bias is None else scale + bias[mine].view(q.shape[:2])
    if M.ndim == 2:
        phi = phi + M[:, None]
        unit = phi.amax(-1)
        phi = (phi - unit[..., None]).exp()
    else:
        unit = M[:, None]
    den = (phi * z[:, None]).sum(-1)
    none = den <= default_eps(q.dtype)
    den = den.masked_fill(none, 1.0)
    return (scale + unit + den.log()).masked_fill(none, -torch.inf), phi @ S / den[..., None]


def of_side(call: Call, side: str) -> Call:
    """Return the call of the `features` of queries or keys."""
    prefix, instruction = f"{side}.", call.instruction
    weights = {name.removeprefix(prefix): x for name, x in instruction.weights.items() if name.startswith(prefix)}
    numbers = {name.removeprefix(prefix): x for name, x in instruction.numbers.items() if name.startswith(prefix)}
    return replace(call, instruction=replace(instruction, weights=weights, numbers=numbers))

"""Linear attention in plain PyTorch, any device: the backend that is always there.

Time is cut into segments, a segment into n chunks of c positions. Within a chunk the (c × c) products of
queries and keys are masked; across chunks the state S' = [S | z] runs on, v' = [v | 1]:

    P  = (φ(Q) φ(K)ᵀ) ⊙ pair                   o' = P v' + (query ⊙ φ(Q)) S'_in      o = o'[:e] / (o'[e] + eps)
    S'_out = keep · S'_in + (key ⊙ φ(K))ᵀ v'

and, with G' the gradient of o' and R' that of S'_out (eq. 13–15 of Katharopoulos et al. 2020, by chunks),

    dφ(Q) = (G'v'ᵀ ⊙ pair) φ(K) + query ⊙ G'S'_inᵀ        R'_in = keep · R' + (query ⊙ φ(Q))ᵀ G'
    dφ(K) = (G'v'ᵀ ⊙ pair)ᵀ φ(Q) + key ⊙ v'R'ᵀ            dv' = PᵀG' + (key ⊙ φ(K)) R'

The factors pair, query, key and keep (`weights.py`) are 1 for a plain sum. Features and sums are float32
(float64 for float64 inputs). Kept for backward: q, k, v, o and the denominator, one number per query. Features
are computed again; beside the results lives one segment's worth of temporaries, and one state a segment.

`forward` and `step` are made of differentiable operations, so the second derivative is autograd through `forward`.
"""

from tarnn.kernels.eager import backward_pass, forward_pass, one_token, packed
from tarnn.kernels.linear import IN_TIME, PER_SEQUENCE, Call, Gradients, Outputs, Returned
from tarnn.numerics import full_precision


def refusal(call: Call) -> str | None:
    """None: it takes every call."""
    return None


def forward(call: Call, *, for_backward: bool = True, with_state: bool = True) -> Outputs:
    with full_precision(call.q):
        if (cuts := call.cuts()) is not None:
            return packed.forward(forward_pass.forward, call, cuts, IN_TIME, PER_SEQUENCE)
        return forward_pass.forward(call)


def backward(call: Call, returned: Returned) -> Gradients:
    with full_precision(call.q):
        if (cuts := call.cuts()) is not None:
            return packed.backward(backward_pass.backward, call, returned, cuts, IN_TIME, PER_SEQUENCE).of(call)
        return backward_pass.backward(call, returned)


def step(call: Call, *, inplace: bool = False) -> Outputs:
    with full_precision(call.q):
        return one_token.step(call, inplace)

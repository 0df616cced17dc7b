"""Softmax over very many classes, estimated by random features: the classes are summed once, each query then costs O(m·d).

    Z(q) = Σ_j e^(w_j + scale·q·k_j) ≈ φ(q) · Σ_j e^(w_j) φ(k_j)          p_j = e^(w_j + scale·q·k_j) / Z(q)

For recommenders and language models with n items or words: after one pass over them, O(n·m·d), neither Z nor the
probability of a given class depends on n any more. (Rawat et al. 2019, "Sampled Softmax with Random Fourier
Features", arXiv 1907.10747, sample with such features; here they stand for the sum itself.)
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tarnn.feature_maps.base import FeatureMap
from tarnn.feature_maps.draws import SoftmaxKernelMap
from tarnn.numerics import finite, full_precision
from tarnn.ops.features import features

CHUNK = 16_384  # classes whose features are there at once


class ClassSums(NamedTuple):
    """Σ_j e^(w_j) φ(k_j) = total · e^log_scale over classes: total (f,), log_scale () its largest log-weight.

    A value: `a + b` are the sums over the classes of both, so that classes can be added as they come.
    """

    total: Float[Tensor, " f"]
    log_scale: Float[Tensor, ""]

    def __add__(self, other):
        scale = torch.maximum(self.log_scale, other.log_scale)
        weights = ((x.log_scale - finite(scale)).exp() for x in (self, other))
        return ClassSums(sum(x.total * w for x, w in zip((self, other), weights)), scale)


class RandomFeatureSoftmax(NamedTuple):
    """log_prob (…, c) of the classes asked for; log_partition (…,), log Z(q), and its standard error.

    The error is that of log Z (so, nearly, the relative error of Z): the spread of the m draws' estimates, by √m.
    It is exact in expectation for independent draws and a little too large for orthogonal ones, whose errors
    cancel. Above about 0.2 it is too small itself, and Z with it, since the largest estimates are rare: take more
    features, or centre queries and classes (`Reparametrized`).
    """

    log_prob: Float[Tensor, "*batch c"]
    log_partition: Float[Tensor, "*batch"]
    standard_error: Float[Tensor, "*batch"]


def sum_classes(
    k: Float[Tensor, "n d"], feature_map: FeatureMap, *, log_weight: Float[Tensor, " n"] | None = None
) -> ClassSums:
    """The sums over all classes k, chunk by chunk: O(n·m·d) time, and memory for one chunk's features only
    (under autograd, for those of all classes).

    feature_map: random features of softmax's kernel, as `PositiveRandomFeatures`. log_weight: w_j, biases or the
    logarithms of how often a class counts. Differentiable in k and log_weight. Sums are float32 at least.
    """
    _kernel_of(feature_map)
    total: ClassSums | None = None
    for start in range(0, max(1, k.shape[0]), CHUNK):
        phi, scale = features(feature_map, k[start : start + CHUNK], "keys")
        assert scale is not None
        weight = scale if log_weight is None else scale + log_weight[start : start + CHUNK].to(scale.dtype)
        top = weight.detach().amax() if len(weight) else weight.new_tensor(-torch.inf)
        with full_precision(k):
            part = ClassSums((weight - finite(top)).exp() @ phi.to(weight.dtype), top)
        total = part if total is None else total + part
    assert total is not None
    return total


def random_feature_softmax(
    q: Float[Tensor, "*batch d"],
    k: Float[Tensor, "*batch_k c d"],
    feature_map: FeatureMap,
    sums: ClassSums,
    *,
    log_weight: Float[Tensor, "*batch_k c"] | None = None,
) -> RandomFeatureSoftmax:
    """log p of the classes k for queries q, with Z estimated: exact logits, an estimated denominator. O(m·d + c·d).

    q: (…, d). k: the classes asked for, (c, d) or (…, c, d), with their log_weight; any number of them, none too.
    feature_map: the map that made `sums` (by `sum_classes` over *all* classes), with the same draw.

    The estimate of Z is unbiased, so that of log Z is a little low, by half the square of the standard error. A
    cross-entropy −log_prob with it can be trained on; `exp(log_prob)` need not add up to 1 exactly.

    Raises ValueError for a map whose estimates may be negative, or that is not random features of softmax.

    >>> phi, items = PositiveRandomFeatures(16, 1024, seed=0), torch.randn(10_000, 16)
    >>> sums = sum_classes(items, phi)
    >>> random_feature_softmax(torch.randn(8, 16), items[:5], phi, sums).log_prob.shape
    torch.Size([8, 5])
    """
    kernel = _kernel_of(feature_map)
    phi, scale = features(feature_map, q, "queries")
    assert scale is not None
    each = phi.to(sums.total.dtype) * sums.total  # (…, f)
    each = each.unflatten(-1, (-1, kernel.num_draws)).sum(-2)  # features that share a draw are one estimate
    log_partition = each.sum(-1).log() + scale + sums.log_scale
    error = each.detach().std(-1) / each.detach().mean(-1) / kernel.num_draws**0.5
    wide = log_partition.dtype
    with full_precision(q):
        logits = kernel.scale * (k.to(wide) @ q.to(wide)[..., None]).squeeze(-1)
    if log_weight is not None:
        logits = logits + log_weight.to(wide)
    return RandomFeatureSoftmax(logits - log_partition[..., None], log_partition, error)


def _kernel_of(feature_map: FeatureMap) -> SoftmaxKernelMap:
    """The map that has the draws and the scale: this one, or the one in a `Reparametrized`."""
    inner = feature_map.inner
    if not isinstance(inner, SoftmaxKernelMap):
        raise ValueError(
            "softmax over classes needs random features of softmax's kernel, such as PositiveRandomFeatures; got "
            f"{type(feature_map).__name__}."
        )
    if not inner.positive:
        raise ValueError(
            f"{type(inner).__name__} may estimate a negative sum, which has no logarithm; take positive features."
        )
    return inner

"""Distributions over the 256 values of a channel of a pixel, parametrised by a model's output.

Each has `num_parameters`, `log_prob` of given values, `log_probs` of all 256, and `sample`; all in float32 (float64
for float64 parameters). A value x ∈ {0 … 255} stands for the point x/127.5 − 1 in [−1, 1].
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from tarnn.numerics import widen
from tarnn.ops.mixture import sample_mixture

NUM_VALUES = 256
# the least as PixelCNN++: all mass in one bin; at the most, it is spread over all of them
LOG_SCALES = (-7.0, 7.0)


@dataclass(frozen=True)
class LogisticMixture:
    """A mixture of logistic distributions, each value's probability being its mass between the values' midpoints.

        P(x) = Σ_m π_m [σ((x + ½ − μ_m)/s_m) − σ((x − ½ − μ_m)/s_m)]        (in units of a value)

    with the first bin open to −∞ and the last to +∞, so that the 256 of them add up to one. The parameters
    (…, 3·num_mixtures) are the logits of π, the means μ and the logarithms of the scales s, one group after the
    other; μ and s on [−1, 1].

    Salimans et al. 2017 (PixelCNN++, arXiv 1701.05517), section 2.1. Where they go over to the density once a bin's
    mass is small, here a difference of sigmoids is σ(a) − σ(b) = σ(a) σ(−b) (1 − e^(b−a)): exact for any size, and
    every gradient is finite.
    """

    num_mixtures: int = 10
    name: ClassVar[str] = "logistic_mixture"

    @property
    def num_parameters(self) -> int:
        return 3 * self.num_mixtures

    def log_prob(self, parameters: Float[Tensor, "*n p"], values: Int[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """Compute log P(values), nats."""
        return self._log_prob(parameters, values[..., None]).squeeze(-1)

    def log_probs(self, parameters: Float[Tensor, "*n p"]) -> Float[Tensor, "*n 256"]:
        """Compute log P(x) for x = 0 … 255."""
        return self._log_prob(parameters, torch.arange(NUM_VALUES, device=parameters.device))

    def sample(
        self, parameters: Float[Tensor, "*n p"], generator: torch.Generator | None = None, temperature: float = 1.0
    ) -> Int[Tensor, "*n"]:
        """Draw a value from each distribution: a component, a point of its logistic, the value nearest to that.

        temperature divides the logits of π and multiplies the scales; at 0, the mean of the likeliest component.
        """
        if temperature:
            return sample_mixture(parameters, LOG_SCALES, temperature, generator)
        logits, means, _ = self._split(parameters)
        point = means.gather(-1, logits.argmax(-1, keepdim=True))
        return ((point + 1) * 127.5).round().clamp(0, NUM_VALUES - 1).long().squeeze(-1)

    def _split(self, parameters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, means, log_scales = widen(parameters).chunk(3, dim=-1)
        return logits, means, log_scales.clamp(*LOG_SCALES)

    def _log_prob(self, parameters: Tensor, values: Tensor) -> Tensor:
        """Parameters (…, p) and values that broadcast to (…, v) → (…, v)."""
        logits, means, log_scales = (x.unsqueeze(-2) for x in self._split(parameters))  # (…, 1, m)
        x = values.to(means.dtype)[..., None] / 127.5 - 1
        per_scale = (-log_scales).exp()
        above, below = (x + 1 / 255 - means) * per_scale, (x - 1 / 255 - means) * per_scale  # (…, v, m)
        first, last = (values == 0)[..., None], (values == NUM_VALUES - 1)[..., None]
        width = torch.log(-torch.expm1(-2 / 255 * per_scale))  # log(1 − e^(b−a))
        mass = (
            torch.where(last, 0.0, logsigmoid(above))
            + torch.where(first, 0.0, logsigmoid(-below))
            + torch.where(first | last, 0.0, width)
        )
        return torch.logsumexp(logits.log_softmax(-1) + mass, dim=-1)


@dataclass(frozen=True)
class Categorical:
    """One logit for each of the 256 values; that neighbouring values are alike must be learned."""

    name: ClassVar[str] = "categorical"
    num_parameters: ClassVar[int] = NUM_VALUES

    def log_prob(self, parameters: Float[Tensor, "*n p"], values: Int[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """Compute log P(values), nats."""
        return self.log_probs(parameters).gather(-1, values.long()[..., None]).squeeze(-1)

    def log_probs(self, parameters: Float[Tensor, "*n p"]) -> Float[Tensor, "*n 256"]:
        """Compute log P(x) for x = 0 … 255."""
        return widen(parameters).log_softmax(-1)

    def sample(
        self, parameters: Float[Tensor, "*n p"], generator: torch.Generator | None = None, temperature: float = 1.0
    ) -> Int[Tensor, "*n"]:
        """Draw a value from each distribution; temperature divides the logits; at 0, the likeliest value."""
        if temperature == 0:
            return parameters.argmax(-1)
        wide = widen(parameters)
        noise = torch.empty_like(wide).exponential_(generator=generator)
        return (wide / temperature - noise.log()).argmax(-1)


Likelihood = LogisticMixture | Categorical

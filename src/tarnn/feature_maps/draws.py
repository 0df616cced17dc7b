"""ω, the directions of random features: drawn without bias, reproducibly, and kept with the model.

What a draw must get right, and public implementations do not:

* Q of a QR decomposition is not uniform on the orthogonal group: LAPACK fixes signs, so that its first entry is
  always negative. The columns times sign(diag R) are (Mezzadri 2007, arXiv math-ph/0609050). Without it,
  positive features overestimate exp(x·y) by 44 % at d = 4 and by 7 % at d = 16.
* The norm of a Gaussian vector does not depend on its direction, so norms are drawn afresh: those of the block
  that was orthogonalised are not independent of the directions that came out of it.
"""

import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tarnn.feature_maps.base import FeatureMap

NORMS = ("chi", "fixed")


def draw_omega(
    num: int, dim: int, *, directions: str = "orthogonal", norms: str = "chi", generator: torch.Generator
) -> Float[Tensor, "num dim"]:
    """Draw `num` random vectors of `dim` channels, float64, on the CPU whatever the default device.

    directions: "orthogonal": blocks of dim rows that are orthogonal to each other, each row uniform on the
        sphere; any num, the last block cut short. Choromanski et al. 2021, section 2.4 (arXiv 2009.14794).
        "iid": independent rows. "hadamard": H D₁ H D₂ H D₃ / d^1.5 with the Hadamard matrix H and random signs;
        dim must be a power of two. "givens": 4⌈log₂ d⌉ rounds of d/2 rotations by random angles in random pairs.
        The last two are orthogonal too but only nearly uniform (a small bias); they take O(d) and O(d log d) random
        numbers a block instead of d², and O(d² log d) time instead of O(d³), which at d ≤ 128 gains nothing
        (Choromanski et al. 2017, arXiv 1703.00864; 2019, *Unifying Orthogonal Monte Carlo Methods*, ICML).
    norms: "chi", those of Gaussian vectors: then rows of "iid" and of "orthogonal" are N(0, I) each; or "fixed",
        √dim.
    """
    blocks = -(-num // dim)
    unit = DIRECTIONS[directions](blocks, dim, generator).flatten(0, 1)[:num]
    if norms == "fixed":
        return unit * dim**0.5
    return unit * _randn(num, dim, generator=generator).norm(dim=-1, keepdim=True)


def _randn(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")


def _signs(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randint(2, shape, generator=generator, device="cpu").double() * 2 - 1


def _iid(blocks: int, dim: int, generator: torch.Generator) -> Tensor:
    return torch.nn.functional.normalize(_randn(blocks, dim, dim, generator=generator), dim=-1)


def _orthogonal(blocks: int, dim: int, generator: torch.Generator) -> Tensor:
    q, r = torch.linalg.qr(_randn(blocks, dim, dim, generator=generator))
    signs = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)
    return q * signs[:, None]


def _hadamard(blocks: int, dim: int, generator: torch.Generator) -> Tensor:
    if dim & (dim - 1):
        raise ValueError(
            f'directions="hadamard" needs a head_dim that is a power of two; got {dim}. Take "givens" or "orthogonal".'
        )
    x = torch.eye(dim, dtype=torch.float64, device="cpu").expand(blocks, dim, dim)
    for _ in range(3):
        x = _walsh_hadamard(_signs(blocks, dim, 1, generator=generator) * x)
    return x * dim**-1.5


def _walsh_hadamard(x: Tensor) -> Tensor:
    """Compute H x along the last axis but one, in log₂ d rounds of sums and differences."""
    dim, half = x.shape[-2], 1
    while half < dim:
        pairs = x.unflatten(-2, (-1, 2, half))
        x = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], dim=2).flatten(1, 3)
        half *= 2
    return x


def _givens(blocks: int, dim: int, generator: torch.Generator) -> Tensor:
    x = torch.diag_embed(_signs(blocks, dim, generator=generator))
    rows = torch.arange(blocks, device="cpu")[:, None]
    for _ in range(4 * max(1, (dim - 1).bit_length())):
        order = torch.rand(blocks, dim, generator=generator, device="cpu").argsort(-1)
        i, j = order[:, : dim // 2], order[:, dim // 2 : dim // 2 * 2]
        angle = torch.rand(blocks, dim // 2, 1, generator=generator, device="cpu", dtype=torch.float64)
        cos, sin = (2 * torch.pi * angle).cos(), (2 * torch.pi * angle).sin()
        a, b = x[rows, i], x[rows, j]
        x[rows, i], x[rows, j] = cos * a - sin * b, sin * a + cos * b
    return x


DIRECTIONS: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "orthogonal": _orthogonal,
    "iid": _iid,
    "hadamard": _hadamard,
    "givens": _givens,
}


class RandomFeatureMap(FeatureMap):
    """A map with random directions ω (m, d), shared by all heads.

    Buffers, saved with the model: `omega`; `seed` and `draw`, of which it is a function. `redraw` replaces it by
    the next draw, or by the draw of a given number: the same on every machine that takes part in a training and
    in one that is resumed. Nothing else ever changes ω: no forward, in training or not.

    seed: by default one that torch's global generator gives, so that maps differ and `torch.manual_seed`
        repeats them.

    Raises ValueError for names, sizes and seeds that don't exist, and for x of another width.
    """

    omega: Tensor
    seed: Tensor
    draw: Tensor

    def __init__(
        self,
        head_dim: int,
        num_draws: int,
        *,
        directions: str = "orthogonal",
        norms: str = "chi",
        seed: int | None = None,
    ):
        super().__init__()
        name = type(self).__name__
        for option, value, known in (("directions", directions, DIRECTIONS), ("norms", norms, NORMS)):
            if value not in known:
                raise ValueError(f"{name} takes {option} = {', '.join(known)}; got {value!r}.")
        if head_dim < 1 or num_draws < 1:
            raise ValueError(f"{name} needs head_dim ≥ 1 and num_features ≥ 1; got {head_dim}, {num_draws}.")
        if seed is None:
            seed = int(torch.randint(2**62, (), device="cpu"))
        if not 0 <= seed < 2**63:
            raise ValueError(f"{name} needs 0 ≤ seed < 2⁶³; got {seed}.")
        self.head_dim, self.num_draws, self.directions, self.norms = head_dim, num_draws, directions, norms
        self.first_seed = seed
        self.register_buffer("omega", torch.empty(num_draws, head_dim))
        self.register_buffer("seed", torch.tensor(seed))
        self.register_buffer("draw", torch.tensor(0))
        if not self.omega.is_meta:
            self.redraw(0)

    def omega_of(self, seed: int, draw: int) -> Float[Tensor, "m d"]:
        """ω as a function of its seed and its number, in float64."""
        digest = hashlib.sha256(f"{seed}/{draw}".encode()).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return draw_omega(
            self.num_draws, self.head_dim, directions=self.directions, norms=self.norms, generator=generator
        )

    @torch.no_grad()
    def redraw(self, draw: int | None = None) -> None:
        """Write the next draw, or the draw of that number, into `omega`."""
        draw = int(self.draw) + 1 if draw is None else draw
        self.omega.copy_(self.omega_of(int(self.seed), draw))
        self.draw.fill_(draw)

    def initial_buffers(self) -> dict[str, Tensor]:
        omega = self.omega_of(self.first_seed, 0)
        return {"omega": omega, "seed": torch.tensor(self.first_seed), "draw": torch.tensor(0)}

    def check_width(self, x: Tensor) -> None:
        if x.shape[-1] != self.head_dim:
            name = type(self).__name__
            raise ValueError(f"this {name} was made for head_dim = {self.head_dim}; got {tuple(x.shape)}.")

    def extra_repr(self) -> str:
        norms = "" if self.norms == "chi" else f", norms={self.norms}"
        features = self.num_features(self.head_dim)
        return f"head_dim={self.head_dim}, num_features={features}, directions={self.directions}{norms}"


class SoftmaxKernelMap(RandomFeatureMap):
    """Random features of softmax's kernel, φ(x)·φ(y) ≈ exp(scale·x·y): `Reparametrized` may be put around them.

    scale: of the product, as in `scaled_dot_product_attention`, by default 1/√head_dim. Each side is multiplied by √scale,
        once, in the map.
    """

    log_scaled = True
    dot_product = True

    def __init__(self, head_dim: int, num_draws: int, *, scale: float | None, **draws: Any):
        if scale is not None and not 0 < scale < math.inf:
            raise ValueError(f"{type(self).__name__} estimates exp(scale·x·y) with a scale above 0; got {scale}.")
        super().__init__(head_dim, num_draws, **draws)
        self.scale: float = head_dim**-0.5 if scale is None else scale

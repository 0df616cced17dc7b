"""Latent attention (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1), absorbed: keys and values of all heads are one latent.

    c = norm(W_c x)     k = [c, r], r = rotated W_r x     values = c
    q_h = [W_k,hᵀ W_q,h x, rotated W_p,h x]                o_h = W_v,h Σ softmax(q_h·k / √d) c

d is the width of a query before it is moved into the latent. Keys of a head, W_k,h c, are never made: their products with
a query are those of the latent with W_k,hᵀ times the query. Prompts are computed as steps are, so their bits are equal.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from tarnn.families.config import Config
from tarnn.families.parts import dense, rms
from tarnn.families.weights import Weights
from tarnn.program.recording import Register, concat, head_product, heads, product, rotate, softmax

EPS = 1e-6  # of the norms of latents, whatever the config says of others


@dataclass(frozen=True)
class LatentSizes:
    """Heads; channels of a key without positions (`plain`), with them (`turned`), of a value, of the latent.

    query_latent: channels of a latent that queries are made of; None: they are made of x.
    """

    heads: int
    plain: int
    turned: int
    value: int
    latent: int
    query_latent: int | None
    bias: bool

    @classmethod
    def of(cls, config: Config) -> "LatentSizes":
        n = config.size("num_attention_heads")
        config.choice("num_key_value_heads", n)
        plain, turned = config.size("qk_nope_head_dim", 128), config.size("qk_rope_head_dim", 64)
        config.choice("qk_head_dim", plain + turned)
        return cls(
            n,
            plain,
            turned,
            config.size("v_head_dim", 128),
            config.size("kv_lora_rank", 512),
            config.size("q_lora_rank", None),
            config.flag("attention_bias", False),
        )


def latent_attention(
    x: Register, w: Weights, sizes: LatentSizes, frequencies: Float[Tensor, " p"] | None = None
) -> Register:
    """Attend, (heads, value) per token. frequencies: of the rotation of neighbouring channels; None: no positions."""
    n, plain, value = sizes.heads, sizes.plain, sizes.value
    kv = dense(x, w, "kv_a_proj_with_mqa", sizes.latent + sizes.turned, bias=sizes.bias)
    latent, key = kv.split(sizes.latent, sizes.turned)
    q, query = queries(x, w, sizes)
    if frequencies is not None:
        query, key = rotate(query, frequencies, interleaved=True), rotate(key, frequencies, interleaved=True)
    up = w.get("kv_b_proj.weight", (n * (plain + value), sizes.latent)).unflatten(0, (n, plain + value))
    q = concat(head_product(q, up[:, :plain].mT), query)
    k = concat(rms(latent, w, "kv_a_layernorm", EPS), key)
    o = softmax(q, k, sizes.latent, x.record.state("KVCache"), scale=(plain + sizes.turned) ** -0.5)
    return head_product(o, up[:, plain:])


def queries(x: Register, w: Weights, sizes: LatentSizes) -> tuple[Register, Register]:
    """Make the channels without positions, and those with them."""
    name = "q_proj"
    if sizes.query_latent is not None:
        x = rms(dense(x, w, "q_a_proj", sizes.query_latent, bias=sizes.bias), w, "q_a_layernorm", EPS)
        name = "q_b_proj"
    width = sizes.plain + sizes.turned
    rows = w.get(f"{name}.weight", (sizes.heads * width, x.size)).unflatten(0, (sizes.heads, width))
    plain, turned = (product(x, part) for part in rows.split([sizes.plain, sizes.turned], 1))
    return heads(plain, sizes.heads), heads(turned, sizes.heads)

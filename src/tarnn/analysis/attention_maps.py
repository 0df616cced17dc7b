"""Attention matrices of any model, for one input: layer after layer, in blocks, only where they are asked for.

Linear attention never forms its matrix A, but it is linear in its values, o = A v. So with one-hot values V° = 1 the op
itself gives A, column by column (Choromanski et al. 2021, appendix C.4, arXiv 2009.14794). Any other values do as well:
an indicator of groups of keys gives the attention to each group in O(t), and no matrix at all.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tarnn.attention.multihead import MultiHeadAttention

FUNCTIONS = ("sdpa", "tarnn_hybrid", "tarnn_linear")  # of transformers' models: those that take any values
USUAL: dict[str, Any] = {  # what `MultiHeadAttention.forward` may be told, where it is told nothing
    "key_mask": None,
    "cu_seqlens": None,
    "positions": None,
    "rotation": None,
    "state": None,
    "inplace": False,
}


@dataclass(frozen=True)
class AttentionMap:
    """The weights of one attention layer for one input. It holds the layer's q and k, not the weights."""

    name: str  # of the module in the model
    shape: tuple[int, int, int, int]  # (b, h, t, s)
    dtype: torch.dtype
    device: torch.device
    num_kv_heads: int
    mix: Callable[[Tensor], Tensor]  # values (b, g, s, n) → outputs (b, h, t, n)

    @torch.no_grad()
    def onto(self, groups: Float[Tensor, "#b s n"]) -> Float[Tensor, "b h t n"]:
        """Σ_j A_ij groups_jn: with an indicator of groups of keys, the attention that each group gets. O(t·n)."""
        b, _, _, s = self.shape
        values = groups.to(self.device, self.dtype)[:, None].expand(b, self.num_kv_heads, s, -1)
        return self.mix(values)

    def columns(self, start: int, stop: int) -> Float[Tensor, "b h t n"]:
        """A_ij for the keys j = start … stop − 1."""
        keys = torch.arange(self.shape[3])[:, None]
        return self.onto((keys == torch.arange(start, min(stop, self.shape[3])))[None])

    def weights(self, block: int = 256) -> Float[Tensor, "b h t s"]:
        """All of A, which takes O(t·s) memory; it is made of blocks of so many columns."""
        return torch.cat([self.columns(j, j + block) for j in range(0, self.shape[3], block)], dim=-1)


@torch.no_grad()
def attention_maps(model: nn.Module, **inputs: Any) -> list[AttentionMap]:
    """The maps of all attention layers in the order in which they run, after one call of `model(**inputs)`.

    model: one of ours, or one of transformers that runs "sdpa", "tarnn_linear" or "tarnn_hybrid" attention. It is called
    as it is: call model.eval() before, and pass use_cache=False to a language model.

    Raises ValueError where no layer can be looked into, and where a layer continues a sequence, since the keys that its
    state has taken up are no longer there.
    """
    found: list[AttentionMap] = []
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if isinstance(module, MultiHeadAttention):
                hook = module.register_forward_pre_hook(_recorder(name, found), with_kwargs=True)
                stack.callback(hook.remove)
        stack.enter_context(_recorded_functions(model, found))
        model(**inputs)
    if not found:
        raise ValueError(
            f"no attention layer of this {type(model).__name__} can be looked into. It should be a model of tarnn's, or one "
            'of transformers that was loaded with attn_implementation="sdpa", "tarnn_linear" or "tarnn_hybrid".'
        )
    return found


def _recorder(name: str, found: list[AttentionMap]) -> Callable[..., None]:
    """A hook that sees the arguments of one of our layers."""

    def record(layer: MultiHeadAttention, arguments: tuple, options: dict[str, Any]) -> None:
        given = {**options, **dict(zip(("x", "context"), arguments))}
        x, context = given.pop("x"), given.pop("context", None)
        if given.get("state") is not None:
            raise ValueError(
                f"{name} continues a sequence (state=), whose earlier keys are gone; give the model the whole input at "
                "once, with use_cache=False."
            )
        given.pop("return_weights", None)
        how = {**USUAL, **given, "return_state": False}
        places = {name: how[name] for name in ("key_mask", "cu_seqlens")}
        q, k, v = layer.project(x, layer.source(x, context, None), **places)
        shape = (x.shape[0], layer.num_heads, x.shape[1], v.shape[2])

        def mix(values: Tensor) -> Tensor:
            return layer.mix(x, q, k, values, **how)[0]

        found.append(AttentionMap(name, shape, v.dtype, v.device, layer.num_kv_heads, mix))

    return record


@contextmanager
def _recorded_functions(model: nn.Module, found: list[AttentionMap]) -> Iterator[None]:
    """While it lasts, transformers' attention functions note what layers of this model give them."""
    if not hasattr(model, "config"):
        yield
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as table

    names = {id(module): name for name, module in model.named_modules()}
    originals = {name: table[name] for name in FUNCTIONS if name in table}

    def recording(run: Callable) -> Callable:
        def attend(module, query, key, value, attention_mask, **options):
            if getattr(key, "tarnn_cache_layer", None) is not None:
                raise ValueError("these keys lie in a cache of constant size; pass use_cache=False.")

            def mix(values: Tensor) -> Tensor:
                return run(module, query, key, values, attention_mask, **options)[0].transpose(1, 2)

            shape = (*query.shape[:3], key.shape[2])
            found.append(AttentionMap(names.get(id(module), ""), shape, value.dtype, value.device, key.shape[1], mix))
            return run(module, query, key, value, attention_mask, **options)

        return attend

    try:
        for name, function in originals.items():
            table[name] = recording(cast(Callable, function))
        yield
    finally:
        for name in originals:
            del table[name]

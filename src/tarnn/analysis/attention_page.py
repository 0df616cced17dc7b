"""Attention maps as one HTML page that needs nothing else: pick a layer, a head, a token."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from tarnn.analysis.attention_maps import AttentionMap

TEMPLATE = Path(__file__).with_suffix(".html")


def attention_page(maps: Sequence[AttentionMap], tokens: Sequence[str], title: str = "Attention") -> str:
    """The page, for the first row of the batch. tokens: what stands on the axes, as many as queries and keys.

    Each head has a byte per pair of tokens, in units of a 255th of its largest weight. A layer's matrices are made one after
    the other and given up; an axis of another length (cross attention) has numbers.
    """
    data = {"title": title, "tokens": list(tokens), "layers": [as_bytes(one) for one in maps]}
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")  # </script> in a token ends nothing
    return TEMPLATE.read_text(encoding="utf-8").replace("__DATA__", text)


def as_bytes(one: AttentionMap) -> dict[str, Any]:
    """A layer as the page reads it. Negative weights, which maps without a normaliser may have, are shown as none."""
    weights: Tensor = one.weights()[0].float().clamp_min(0)  # (h, t, s)
    largest = weights.flatten(1).amax(-1)
    steps = (255 * weights / largest.clamp_min(1e-30)[:, None, None]).round()
    encoded = base64.b64encode(steps.cpu().numpy().astype(np.uint8).tobytes()).decode()
    _, heads, queries, keys = one.shape
    return {
        "name": one.name,
        "heads": heads,
        "queries": queries,
        "keys": keys,
        "largest": largest.tolist(),
        "weights": encoded,
    }

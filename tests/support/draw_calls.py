"""Calls of `draw_rows`: ways to draw, and whether the compiled kernel draws as the definition does."""

import itertools
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch

from tarnn.decoding.draw_definition import Way, drawn
from tarnn.decoding.draws import RowSampling, by_definition, draw_rows
from tarnn.decoding.philox import uniform

OFF = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
SOME = {
    "temperature": [0.0, 0.1, 0.7, 1.0, 2.5],
    "top_k": [0, 1, 3, 40, 10_000],
    "top_p": [1.0, 0.999, 0.9, 0.3, 1e-6],
    "min_p": [0.0, 0.01, 0.3, 1.0],
    "repetition_penalty": [1.0, 1.0, 1.3, 0.5],
    "frequency_penalty": [0.0, 0.0, 0.7, -2.0],
    "presence_penalty": [0.0, 0.0, 0.4],
    "logit_bias": [{}, {}, {0: 5.0, 2: -100.0}],
}


def sampling(**given):
    return SimpleNamespace(**{**OFF, "logit_bias": {}, **given})


def some_logits(b, v, seed=0, spread=3.0):
    return spread * torch.randn(b, v, generator=torch.Generator().manual_seed(seed))


def near(logits: np.ndarray, way: Way, rounding: float = 2e-5) -> set[int]:
    """The tokens of the definition where its random number and its limits are moved by a rounding."""
    tokens = set()
    for u, p, m in itertools.product((-rounding, 0, rounding), repeat=3):
        moved = way._replace(top_p=way.top_p + p if way.top_p < 1 else 1.0, min_p=way.min_p * (1 + m))
        number = min(max(uniform(way.seed, way.choice, way.position) + u, 0), 1 - 1e-16)
        with mock.patch("tarnn.decoding.draw_definition.uniform", lambda *key, number=number: number):
            tokens.add(drawn(logits, moved))
    return tokens


def alike(seed: int) -> bool:
    """Whether rows of many kinds draw what the definition draws, but where a sum is within rounding of a limit."""
    generator = np.random.default_rng(seed)
    b, v = int(generator.integers(1, 9)), int(generator.choice([1, 2, 63, 64, 65, 300, 5003]))
    logits, rows = some_logits(b, v, seed), RowSampling(b, v)
    for i in range(b):
        way = sampling(**{name: values[generator.integers(len(values))] for name, values in SOME.items()})
        way.logit_bias = {token: x for token, x in way.logit_bias.items() if token < v}
        rows.put(i, way, seed=seed + i, choice=i, prompt=[0], written=[v - 1] * i, likeliest=min(i, v))
    ours, theirs = draw_rows(logits, rows), by_definition(logits, rows)
    same = ours.tokens == theirs.tokens
    torch.testing.assert_close(ours.logprobs[same], theirs.logprobs[same], atol=3e-6, rtol=1e-6)
    torch.testing.assert_close(ours[2:], theirs[2:], atol=3e-6, rtol=1e-6, equal_nan=True)
    return all(same[i] or int(ours.tokens[i]) in near(logits[i].numpy(), rows.way(i)) for i in range(b))

"""An engine with a store on disk: a hit, also after a restart and of another process, is a cold run to the bit."""

import numpy as np
import pytest
import torch
from support.served import alone

from tarnn.serving.engine import Engine
from tarnn.serving.request import Request, Sampling
from tarnn.serving.store import StateStore

PROMPT = np.frombuffer(b"Of a book that is read once, and shared by all who ask about it.", np.uint8).astype(np.int32)


def run(engine, **options):
    """(tokens, the last snapshot, cached tokens) of a request."""
    stream = engine.submit(Request(sampling=Sampling(seed=3), max_tokens=20, keep=True, end_ids=frozenset(), **options))
    events = list(stream)
    return [token for event in events for token in event.tokens], events[-1].snapshot, stream.usage.cached_tokens


@pytest.mark.parametrize("kind", ["linear", "hybrid", "log-weighted", "Llama", "Qwen3.5", "Mamba-2"])
def test_a_restart_changes_no_bit(served, tmp_path, kind):
    model = served(kind)
    cold = Request(prompt=PROMPT, sampling=Sampling(seed=3), max_tokens=20, end_ids=frozenset())
    expected = alone(model, cold)[0]
    for restart in range(3):
        store = StateStore(model, folder=tmp_path, memory=10**7)
        with Engine(model, store=store) as engine:
            engine.start()
            tokens, end, cached = run(engine, prompt=PROMPT)
            if restart == 0:
                held = store.hold("", end)
            assert cached == (len(PROMPT) if restart else 0)
            assert tokens == expected
            again = run(engine, prompt=PROMPT[:9], begin=store.get("", held.id))
            fresh = run(engine, prompt=np.concatenate([end.tokens, PROMPT[:9]]), tenant="another")
            assert again[0] == fresh[0]
            assert torch.equal(again[1].logits, fresh[1].logits)
            assert fresh[2] == (0 if restart == 0 else len(end.tokens) + 9)
        store.close()

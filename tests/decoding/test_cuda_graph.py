"""A recorded step is the model's step. Recording is a GPU's; here what would be recorded is run again instead."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from tarnn.decoding import choice, cuda_graph, fastest_step
from tarnn.decoding.loop import TokenLoop
from tarnn.decoding.plan import Refusal
from tarnn.decoding.samplers import sampler
from tarnn.models import TarnnConfig, TarnnForCausalLM
from tarnn.ops import KVCache


@pytest.fixture
def played_again(monkeypatch):
    """What is recorded runs as often as a recording does, and each time that it is played."""

    def record(run, undo):
        for _ in range(cuda_graph.WARM_UP):
            with torch.no_grad():
                run()
                undo()
        return run

    monkeypatch.setattr(cuda_graph, "record", record)


def make_loop(**options) -> TokenLoop:
    torch.manual_seed(0)
    config = TarnnConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=50, **options)
    model = TarnnForCausalLM(config).eval()
    loop = TokenLoop(model, model.new_state(1, capacity=40))
    loop.read(torch.arange(7)[None])
    return loop


def made(loop: TokenLoop, count: int = 9) -> list[list[int]]:
    draw = sampler(generator=torch.Generator().manual_seed(3))
    return [token.tolist() for token in loop.tokens(draw, count)]


def test_the_same_tokens_and_the_same_state(played_again):
    expected, loop = make_loop(), make_loop()
    loop.step = cuda_graph.RecordedStep(loop.model, loop.state)
    assert made(loop) == made(expected)
    for name, x in loop.state.tensors().items():
        assert torch.equal(x, expected.state.tensors()[name]), name


def test_a_state_from_elsewhere_goes_on(played_again):
    """After the loop's state was replaced by another one, from a file say."""
    expected, loop = make_loop(), make_loop()
    start = loop.state.clone()
    loop.step = cuda_graph.RecordedStep(loop.model, loop.state)
    first = made(loop)
    logits = expected.logits.clone()
    loop.state, loop.logits = start, logits
    assert made(loop) == first == made(expected)


def test_the_warm_up_reads_no_position_that_the_model_does_not_have(played_again):
    """There may be room for a single token more; on a GPU an index beyond a table of positions ends the process."""
    expected, loop = (make_loop(position="learned", max_position_embeddings=8) for _ in range(2))
    loop.step = cuda_graph.RecordedStep(loop.model, loop.state)
    assert made(loop, 1) == made(expected, 1)
    assert loop.state.position.item() == 8


def test_a_step_is_recorded_on_the_device_of_the_model(monkeypatch):
    """Which need not be the current one, whose streams would record nothing."""
    loop, entered, during = make_loop(), [], []

    @contextmanager
    def device_of(x):
        entered.append(x.device)
        yield
        entered.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(cuda_graph, "record", lambda run, undo: during.extend(entered))
    cuda_graph.RecordedStep(loop.model, loop.state)
    assert during == [loop.model.device]


def test_where_there_is_no_gpu_nothing_is_recorded():
    assert "not on a GPU" in cuda_graph.cannot_record(make_loop().state)
    position = SimpleNamespace(device=torch.device("cuda"))
    state = SimpleNamespace(position=position, layers=[KVCache.empty(1, 1, 1, 1)])
    assert "another length" in cuda_graph.cannot_record(state)


def test_a_step_that_cannot_be_recorded_is_taken_as_it_is(played_again, monkeypatch):
    def refuse(run, undo):
        raise RuntimeError("operation not permitted when stream is capturing\nadvice")

    def no_fused_step(*arguments):
        raise Refusal("there is no fused step") from Refusal("as if on a GPU")

    monkeypatch.setattr(choice, "FusedStep", no_fused_step)
    monkeypatch.setattr(choice, "cannot_record", lambda state: None)
    loop = make_loop()
    chosen = fastest_step(loop.model, loop.state)
    assert (chosen.name, chosen.why_not) == ("step recorded in a CUDA graph", ("no fused step: as if on a GPU",))
    loop.step = chosen.step
    assert made(loop) == made(make_loop())
    monkeypatch.setattr(cuda_graph, "record", refuse)
    chosen = fastest_step(loop.model, loop.state)
    assert (chosen.step, chosen.name) == (loop.model.step, "plain step")
    reason = "no CUDA graph: recording failed: operation not permitted when stream is capturing"
    assert chosen.why_not == ("no fused step: as if on a GPU", reason)


def test_the_loop_counts_where_the_step_can_not_look():
    """On a GPU a step doesn't read its position; the loop knows how many tokens there may be."""
    loop = make_loop(max_position_embeddings=10)
    loop.step = lambda token, state, inplace: (loop.logits, state)
    with pytest.raises(ValueError, match="up to 10 tokens"):
        made(loop)

"""The step compiles as one graph, once, and computes what it computed before."""

import pytest
import torch


@pytest.mark.compile
@torch.no_grad()
@pytest.mark.parametrize("kind", ["linear", "two maps", "random features", "gated", "paper"])
def test_step_is_one_graph(make_model, ids, kind):
    torch._dynamo.reset()
    model, x = make_model(kind).float(), ids(2, 8)
    step = torch.compile(model.step, fullgraph=True, backend="aot_eager")
    _, state = model.prefill(x[:, :3], model.new_state(2))
    fork = state.select(torch.arange(2))
    with torch.compiler.set_stance("default"):
        step(x[:, 3], fork, inplace=True)
    with torch.compiler.set_stance("fail_on_recompile"):
        for i in range(4, 8):
            step(x[:, i], fork, inplace=True)
    for i in range(3, 8):
        _, state = model.step(x[:, i], state)
    again, after = step(x[:, 0], fork, inplace=True)
    torch.testing.assert_close(again, model.step(x[:, 0], state)[0])
    assert after.position.tolist() == fork.position.tolist() == [9, 9]


@pytest.mark.compile
def test_training_compiles(make_model, ids):
    torch._dynamo.reset()
    model, x = make_model("hybrid").train(), ids(2, 8)
    loss = torch.compile(model, fullgraph=True, backend="aot_eager")(x, labels=x).loss
    loss.backward()
    torch.testing.assert_close(loss, model(x, labels=x).loss)

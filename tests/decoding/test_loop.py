"""The token loop makes what `model.generate` makes, and its state is that of everything it gave out."""

import pytest
import torch

from tarnn.decoding.loop import TokenLoop
from tarnn.decoding.samplers import greedy, sampler

PROMPT = torch.tensor([[5, 17, 2, 88, 41, 41, 9]])


def loop_for(model, capacity=256, batch_size=1):
    return TokenLoop(model, model.new_state(batch_size, capacity=capacity))


def made(loop, draw, limit, **options):
    return torch.stack(list(loop.tokens(draw, limit, **options)), dim=1)


def test_the_same_seed_gives_the_tokens_of_generate(model):
    choice = {"temperature": 0.9, "top_k": 20, "top_p": 0.95}
    for seed in range(3):
        torch.manual_seed(seed)
        theirs = model.generate(PROMPT, do_sample=True, max_new_tokens=40, **choice)
        loop = loop_for(model)
        loop.read(PROMPT)
        draw = sampler(**choice, generator=torch.Generator().manual_seed(seed))
        ours = made(loop, draw, 40, end_ids=[96], pad_id=95)
        assert torch.equal(ours, theirs[:, PROMPT.shape[1] :])


def test_greedy_choice_and_several_samples_are_those_of_generate(model):
    loop = loop_for(model)
    loop.read(PROMPT)
    theirs = model.generate(PROMPT, do_sample=False, max_new_tokens=25, eos_token_id=None)
    assert torch.equal(made(loop, greedy(), 25), theirs[:, PROMPT.shape[1] :])
    torch.manual_seed(4)
    theirs = model.generate(PROMPT, do_sample=True, top_k=0, max_new_tokens=60, num_return_sequences=3)
    loop = loop_for(model)
    loop.read(PROMPT)
    loop.fork(3)
    ours = made(loop, sampler(generator=torch.Generator().manual_seed(4)), 60, end_ids=[96], pad_id=95)
    assert torch.equal(ours, theirs[:, PROMPT.shape[1] :])


def test_reading_in_pieces_is_reading_at_once(model):
    ids = torch.randint(0, 90, (2, 53), generator=torch.Generator().manual_seed(1))
    logits = []
    for piece in (1, 7, 16, 53, 1000):
        loop = loop_for(model, batch_size=2)
        loop.read(ids, piece=piece)
        logits.append(loop.logits)
        assert loop.state.position.tolist() == [53, 53]
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits[0], model(ids).logits[:, -1], rtol=1e-4, atol=1e-4)


def test_leaving_the_loop_keeps_state_and_logits_in_step(model):
    loop, whole = loop_for(model), loop_for(model)
    loop.read(PROMPT)
    out = []
    for token in loop.tokens(greedy(), 100):
        out.append(token)
        if len(out) == 5:
            break
    whole.read(torch.cat([PROMPT, torch.stack(out, dim=1)], dim=1))
    assert loop.state.position.tolist() == whole.state.position.tolist()
    torch.testing.assert_close(loop.logits, whole.logits, rtol=1e-4, atol=1e-4)
    loop.read(PROMPT)
    whole.read(PROMPT)
    torch.testing.assert_close(loop.logits, whole.logits, rtol=1e-4, atol=1e-4)


def test_rows_end_one_by_one_and_the_loop_with_the_last(make_model):
    model = make_model()
    script = iter([[1, 2], [96, 3], [4, 5], [6, 96], [7, 8]])
    loop = loop_for(model, batch_size=2)
    loop.read(PROMPT.expand(2, -1))
    ours = made(loop, lambda logits: torch.tensor(next(script)), 5, end_ids=[96], pad_id=95)
    assert ours.tolist() == [[1, 96, 95, 95], [2, 3, 5, 96]]


def test_no_tokens_and_nothing_read(make_model):
    loop = loop_for(make_model())
    with pytest.raises(ValueError, match="nothing was read"):
        next(loop.tokens(greedy(), 1))
    loop.read(PROMPT)
    logits = loop.logits
    loop.read(PROMPT[:, :0])
    assert loop.logits is logits
    assert list(loop.tokens(greedy(), 0)) == []


def test_the_loop_counts_where_the_step_can_not_look(make_model):
    """On a GPU a step doesn't read its position; the loop knows how many tokens there may be."""
    loop = loop_for(make_model(max_position_embeddings=10))
    loop.read(PROMPT)
    loop.step = lambda token, state, inplace: (loop.logits, state)
    with pytest.raises(ValueError, match="up to 10 tokens"):
        made(loop, sampler(), 9)

"""What holds for every op that has a state: one suite over all of them. A new op is a row of `support/every_op.py`."""

import pytest
import torch
from support.every_op import close, every_op, every_state

from tarnn.ops import KVCache


@every_state
@pytest.mark.parametrize("cuts", [(3, 3, 8), (1, 66)], ids=str)
def test_prefix_then_rest_is_the_whole(case, chunks, cuts):
    """Outputs, and what comes behind; in any pieces, empty ones too."""
    drawn, bounds = case.draw(2, cuts[-1] + 4), [0, *cuts, cuts[-1] + 4]
    (whole, end), state, pieces = drawn.run(), None, []
    for start, stop in zip(bounds, bounds[1:]):
        o, state = drawn.part(start, stop).run(state)
        pieces.append(o)
    close(torch.cat(pieces, 2), whole)
    more = case.draw(2, 3, seed=1)
    close(more.run(state)[0], more.run(end)[0])


@every_state
def test_token_by_token_is_the_whole(case):
    """Outputs and gradients, by the op's own step where it has one."""
    drawn = case.draw(2, 13).map(lambda x: x.requires_grad_())
    first, state = drawn.part(0, 1).run()
    pieces = [first]
    for i in range(1, 13):
        o, state = drawn.part(i, i + 1).step(state)
        pieces.append(o)
    found, expected = torch.cat(pieces, 2), drawn.run()[0]
    close(found, expected)
    gradients = [torch.autograd.grad(x.square().sum(), drawn.tensors) for x in (found, expected)]
    for x, y in zip(*gradients):
        close(x, y)


@every_state
def test_gradients_pass_through_a_state(case):
    def gradients(attend):
        drawn = case.draw(2, 9).map(lambda x: x.requires_grad_())
        return torch.autograd.grad(attend(drawn)[:, :, 4:].square().sum(), drawn.tensors)

    def handed_over(drawn):
        first, state = drawn.part(0, 4).run()
        return torch.cat([first, drawn.part(4, None).run(state)[0]], 2)

    for x, expected in zip(gradients(handed_over), gradients(lambda drawn: drawn.run()[0])):
        close(x, expected)


@every_op
@pytest.mark.parametrize("cuts", [[0, 3, 5, 5, 12], [0, 7, 70]], ids=str)
def test_packed_is_a_loop(case, chunks, cuts):
    """Outputs, gradients, and states, which are continued as a batch."""
    drawn = case.draw(1, cuts[-1]).map(lambda x: x.requires_grad_())
    pieces = [drawn.part(start, stop) for start, stop in zip(cuts, cuts[1:])]
    packed, loop = drawn.outputs(cu_seqlens=torch.tensor(cuts)), torch.cat([x.outputs() for x in pieces], 2)
    close(packed, loop)
    expected = torch.autograd.grad(loop.square().sum(), drawn.tensors)
    for x, y in zip(torch.autograd.grad(packed.square().sum(), drawn.tensors), expected):
        close(x, y)
    if case.stateful and case.packed_states:
        _, states = drawn.run(cu_seqlens=torch.tensor(cuts))
        more = case.draw(len(pieces), 3, seed=1)
        alone = [more.rows(i).run(x.run()[1])[0] for i, x in enumerate(pieces)]
        close(more.run(states)[0], torch.cat(alone))


@every_op
def test_padded_is_cut(case, chunks):
    """On the right in row 0, on the left in row 1; whatever stands there reaches no output, no state and no gradient."""
    real = torch.ones(2, 11, dtype=torch.bool)
    real[0, 8:] = False
    real[1, :3] = False
    drawn = case.draw(2, 11)
    junk = drawn.map(lambda x: x.clone().requires_grad_())
    for x in junk.inputs:
        x.data.masked_fill_(
            ~real[:, None, :, None], torch.nan if x is not junk.inputs[0] or len(junk.inputs) == 1 else 3
        )
    padded = junk.outputs(key_mask=real)
    gradients = torch.autograd.grad(padded.transpose(1, 2)[real].square().sum(), junk.tensors)
    for row, there in ((0, slice(0, 8)), (1, slice(3, None))):
        cut = drawn.rows(row).part(there.start, there.stop).map(lambda x: x.clone().requires_grad_())
        o = cut.outputs()
        close(padded[row : row + 1, :, there], o)
        if case.stateful:
            more = case.draw(2, 3, seed=1)
            _, state = junk.run(key_mask=real)
            close(more.run(state)[0][row : row + 1], more.rows(row).run(cut.run()[1])[0])
        for x, y in zip(gradients, torch.autograd.grad(o.square().sum(), cut.tensors)):
            close(x[row : row + 1, :, there], y)
    assert all((x.transpose(1, 2)[~real] == 0).all() for x in gradients)


@every_state
@pytest.mark.parametrize("t", [9, 70])
def test_nothing_later_changes_an_output_not_even_a_bit(case, chunks, t):
    drawn, cut = case.draw(2, t), t - 4
    before = drawn.outputs()[:, :, :cut]
    drawn.change(slice(None), slice(None), slice(cut, None), size=100)
    assert torch.equal(drawn.outputs()[:, :, :cut], before)


@every_op
def test_rows_of_a_batch_do_not_mix(case, chunks):
    drawn = case.draw(3, 9)
    before = drawn.outputs()
    drawn.change(1, size=10)
    after = drawn.outputs()
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert not torch.equal(after[1], before[1])


@every_state
def test_a_state_is_a_value(case):
    """It can be kept, forked and continued twice; rows are picked from it; a call leaves it as it was."""
    _, state = case.draw(2, 6).run()
    kept, more = state.clone(), case.draw(3, 4, seed=1)
    forked = more.run(state.select(torch.tensor([1, 0, 1])))[0]
    alone = [more.rows(i).run(state.select(torch.tensor([row])))[0] for i, row in enumerate((1, 0, 1))]
    close(forked, torch.cat(alone))
    for name, x in state.tensors().items():
        assert torch.equal(x, kept.tensors()[name]), name


@every_state
def test_a_step_in_place_writes_into_the_given_state_and_another_does_not(case):
    """And autograd is told: the versions of all that it writes move on."""
    if case.step is None:
        pytest.skip("it has no step")
    _, state = case.draw(2, 6).run()
    kept, more = state.clone(), case.draw(2, 1, seed=1)
    o, after = more.step(state)
    assert all(map(torch.equal, state.tensors().values(), kept.tensors().values()))
    versions = {name: x._version for name, x in state.tensors().items()}
    again, same = more.step(state, inplace=True)
    assert same is state or (isinstance(state, KVCache) and same.k.data_ptr() == state.k.data_ptr())
    close(again, o)
    for name, x in after.tensors().items():
        close(same.tensors()[name], x)
        assert torch.equal(x, kept.tensors()[name]) or same.tensors()[name]._version > versions[name], name

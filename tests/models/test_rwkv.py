"""RWKV-7: the logits of a pretrained model, steps, padding, packed rows, gradients."""

import pytest
import torch
from support.rwkv_models import rwkv_model

from tarnn.attention.token_shift import token_shift
from tarnn.models.rwkv import RwkvModel


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(19, shape, generator=torch.Generator().manual_seed(0))


def close(x, y):
    torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


def test_logits_of_a_pretrained_model(data):
    load_file = pytest.importorskip("safetensors.torch").load_file
    weights = load_file(data("tiny_rwkv") / "rwkv7.safetensors")
    expected = weights.pop("expected_logits")
    model, prompt = RwkvModel.from_weights(weights), torch.tensor([list(b'"in')])
    assert (model(prompt)[0, -1] - expected).abs().max() < 1e-5
    logits, state = model.prefill(prompt[:, :1], model.new_state(1))
    for token in prompt[0, 1:]:
        logits, state = model.step(token[None], state)
    assert (logits[0] - expected).abs().max() < 1e-5
    assert state.position.tolist() == [3]


def test_prefill_and_steps_are_the_parallel_pass():
    model, ids = rwkv_model(), tokens(2, 23)
    whole, state = model(ids), model.new_state(2)
    for start, stop in ((0, 1), (1, 14), (14, 18)):
        logits, state = model.prefill(ids[:, start:stop], state)
        close(logits, whole[:, stop - 1].float())
    for i in range(18, 23):
        kept = state.clone()
        logits, after = model.step(ids[:, i], state)
        assert all(torch.equal(x, y) for x, y in zip(state.tensors().values(), kept.tensors().values()))
        close(logits, whole[:, i].float())
        state = after
    assert state.position.tolist() == [23, 23]


def test_padded_rows_are_rows_alone():
    """On the right in row 0, on the left in row 1, within row 2; logits, states and what follows."""
    model, ids, mask = rwkv_model(), tokens(3, 11), torch.ones(3, 11, dtype=torch.int64)
    mask[0, 8:] = mask[1, :3] = mask[2, 4:6] = 0
    logits = model(ids, mask)
    last, state = model.prefill(ids, model.new_state(3), mask)
    following = model.step(ids[:, 0], state)[0]
    for row in range(3):
        alone = ids[row : row + 1, mask[row].bool()]
        close(logits[row, mask[row].bool()], model(alone)[0])
        expected, state_alone = model.prefill(alone, model.new_state(1))
        close(last[row : row + 1], expected)
        close(following[row : row + 1], model.step(ids[row : row + 1, 0], state_alone)[0])
    assert state.position.tolist() == mask.sum(-1).tolist()


def test_packed_rows_are_rows_alone_with_their_gradients():
    model, ids, cuts = rwkv_model(), tokens(1, 21), [0, 5, 5, 6, 21]
    packed = model(ids, cu_seqlens=torch.tensor(cuts))
    alone = torch.cat([model(ids[:, i:j]) for i, j in zip(cuts, cuts[1:]) if i < j], 1)
    close(packed, alone)
    weights = list(model.parameters())
    for x, y in zip(*(torch.autograd.grad(o.square().sum(), weights) for o in (packed, alone))):
        close(x, y)


@pytest.mark.parametrize("packed", [False, True])
def test_token_shift_finds_the_real_token_before(packed):
    real = torch.tensor([[False, True, True, False, True, False], [False, False, True, True, True, True]])
    cuts = [0, 2, 2, 9, 12] if packed else [0, 6, 12]
    x, last = torch.randn(12, 3).double(), torch.randn(len(cuts) - 1, 3).double()
    x[~real.flatten()] = torch.nan
    shape = (1, 12) if packed else (2, 6)
    given = torch.tensor(cuts) if packed else None
    before, behind = token_shift(x.view(*shape, 3), last, real.view(shape), given)
    for i, (start, stop) in enumerate(zip(cuts, cuts[1:])):
        now = last[i]
        for j in range(start, stop):
            assert torch.equal(before.view(12, 3)[j], now)
            now = x[j] if real.flatten()[j] else now
        assert torch.equal(behind[i], now)


def test_weights_of_another_model_are_refused():
    weights = dict(rwkv_model().state_dict())
    with pytest.raises(ValueError, match=r"lack.*head\.weight"):
        RwkvModel.from_weights({name: x for name, x in weights.items() if name != "head.weight"})
    with pytest.raises(ValueError, match=r"blocks\.0\.att\.key\.weight"):
        RwkvModel.from_weights(weights | {"blocks.0.att.key.weight": torch.zeros(3, 3)})
    with pytest.raises(ValueError, match=r"RWKV-5 or RWKV-6, but .* Take a checkpoint of RWKV-7"):
        RwkvModel.from_weights({"blocks.0.att.time_decay": torch.zeros(3, 4, 1)})
    with pytest.raises(ValueError, match="not the weights"):
        RwkvModel.from_weights({"model.embed.weight": torch.zeros(3, 3)})
    assert RwkvModel.from_weights(weights)(tokens(1, 3)).shape == (1, 3, 19)

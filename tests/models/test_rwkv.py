"""RWKV-7: the logits of a pretrained model, steps, padding, packed rows, gradients."""

import pytest
import torch
from support.rwkv_models import HEADS, HIDDEN, rwkv_model

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


def test_nothing_later_changes_a_logit():
    model, ids = rwkv_model(), tokens(2, 20)
    before = model(ids)[:, :15]
    ids[:, 15:] = (ids[:, 15:] + 1) % 19
    assert torch.equal(model(ids)[:, :15], before)


def test_rwkv7_is_its_recurrence():
    """Of one layer, token by token, as its paper writes it."""
    torch.manual_seed(0)
    layer = rwkv_model().blocks[1].att
    x, first = torch.randn(1, 6, HIDDEN).double(), torch.randn(1, 6, HIDDEN).double()
    y, S_behind, last, _ = layer(x, torch.zeros(1, HEADS, 4, 4).double(), torch.zeros(1, HIDDEN).double(), first)
    S, before, outputs = torch.zeros(HEADS, 4, 4).double(), torch.zeros(HIDDEN).double(), []
    for i in range(6):
        now = x[0, i]
        x_r, x_w, x_k, x_v, x_a, x_g = (now + (before - now) * mix[0] for mix in layer.x_rwkvag)
        before = now
        heads = lambda z: z.view(HEADS, 4)  # noqa: E731
        w = torch.exp(
            -(0.5 * torch.ones(())).neg().exp() * torch.sigmoid(layer.w0[0, 0] + layer.w2 @ torch.tanh(layer.w1 @ x_w))
        )
        alpha = torch.sigmoid(layer.a0[0, 0] + layer.a2 @ (layer.a1 @ x_a))
        gate = layer.g2 @ torch.sigmoid(layer.g1 @ x_g)
        r, k, v = layer.receptance(x_r), layer.key(x_k), layer.value(x_v)
        v = v + (first[0, i] - v) * torch.sigmoid(layer.v0[0, 0] + layer.v2 @ (layer.v1 @ x_v))
        kappa = heads(k * layer.k_k[0, 0])
        kappa = kappa / kappa.norm(dim=-1, keepdim=True)
        k = heads(k * (1 + (alpha - 1) * layer.k_a[0, 0]))
        read = torch.einsum("hd,hde->he", kappa, S)
        S = (
            heads(w)[..., None] * S
            - (kappa * heads(alpha))[..., None] * read[:, None]
            + k[..., None] * heads(v)[:, None]
        )
        o = torch.einsum("hd,hde->he", heads(r), S)
        o = (o - o.mean(-1, keepdim=True)) / (o.var(-1, keepdim=True, unbiased=False) + 64e-5).sqrt()
        o = o.flatten() * layer.ln_x.weight + layer.ln_x.bias
        o = o + ((heads(r) * k * layer.r_k).sum(-1, keepdim=True) * heads(v)).flatten()
        outputs.append(layer.output(o * gate))
    torch.testing.assert_close(y[0], torch.stack(outputs), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(S_behind[0], S, rtol=1e-7, atol=1e-7)
    assert torch.equal(last, x[:, -1])


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

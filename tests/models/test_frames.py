"""Frames through strided convolutions: padding changes nothing, and a stream is what the whole is."""

import pytest
import torch
from torch.nn.functional import conv1d, gelu, pad

from tarnn.models import TarnnConfig, TarnnForCTC
from tarnn.models.convolved_frames import ConvolvedFrames


def frames_of(causal: bool, subsampling: int = 4) -> ConvolvedFrames:
    torch.manual_seed(0)
    return ConvolvedFrames(6, 8, subsampling, causal=causal).double()


@pytest.mark.parametrize("t", [8, 9, 11])
def test_the_formula(t):
    """Of an encoder: two convolutions with padding 2; a causal one sees three frames before its two."""
    x = torch.randn(2, t, 6).double()
    for causal in (False, True):
        front, y = frames_of(causal), x.mT
        for layer in front.convolutions:
            sides = (3, y.shape[2] % 2) if causal else (2, 2)
            y = gelu(conv1d(pad(y, sides), layer.weight, layer.bias, stride=2))
        torch.testing.assert_close(front(x), front.proj(y.mT))
        assert front(x).shape[1] == front.num_positions(torch.tensor(t))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("subsampling", [2, 4, 8])
@pytest.mark.parametrize("length", [1, 5, 6, 8])
def test_a_padded_row_is_as_alone(causal, subsampling, length):
    front, x = frames_of(causal, subsampling), torch.randn(1, 17, 6).double()
    mask = torch.arange(17)[None] < length
    positions, real = front.read(x, mask)
    alone = front(x[:, :length])
    assert real.sum() == alone.shape[1]
    torch.testing.assert_close(positions[:, : alone.shape[1]], alone)


def test_a_causal_position_sees_its_own_frames_and_those_before():
    front, x = frames_of(True), torch.randn(1, 16, 6).double()
    other = x.clone()
    other[:, 8:] = torch.randn(1, 8, 6)
    torch.testing.assert_close(front(other)[:, :2], front(x)[:, :2], rtol=0, atol=0)
    assert not torch.allclose(front(other)[:, 2:], front(x)[:, 2:])


@pytest.mark.parametrize("pieces", [[8, 4, 9], [4, 4, 4, 4, 5]])
@pytest.mark.parametrize("front", ["conv", "stack"])
def test_a_stream_gives_what_the_whole_gives(front, pieces):
    """With a convolution in each block as well; the state is of constant size, and rows can be picked from it."""
    torch.manual_seed(0)
    model = TarnnForCTC(
        TarnnConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=11, pad_token_id=0, input_size=6,
            subsampling=4, front=front, conv_kernel=5, initializer_range=0.3,
        )
    ).eval()  # fmt: skip
    x = torch.randn(2, sum(pieces), 6)
    whole, state, outputs = model(input_features=x).logits.detach(), model.new_state(2), []
    size = state.nbytes
    for part in x.split(pieces, 1):
        logits, state = model.prefill(part, state, inplace=True)
        state = state.select(torch.tensor([0, 1]))
        outputs.append(logits)
        assert state.nbytes == size
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-4, atol=1e-5)


def test_a_model_of_both_sides_has_no_stream():
    with pytest.raises(ValueError, match="causal=False"):
        frames_of(False).prefill(torch.randn(1, 4, 6).double(), ())

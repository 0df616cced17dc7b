"""The pixel loop: what it draws is what the likelihood says, from nothing or from half an image."""

import pytest
import torch

from tarnn.decoding.pixels import PixelLoop, pixel_sampler, upper_rows
from tarnn.models import TarnnForImageGeneration, TarnnImageConfig

TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "initializer_range": 0.3,
    "image_height": 4,
    "image_width": 3,
    "num_mixtures": 3,
}


def build(**choices):
    torch.manual_seed(0)
    return TarnnForImageGeneration(TarnnImageConfig(**TINY | choices)).eval()


def images(model, batch, seed=0, *, class_labels=None, known=None, **options):
    loop = PixelLoop(model, batch, class_labels=class_labels, known=known)
    generator = torch.Generator().manual_seed(seed)
    counts = list(loop.draw(pixel_sampler(model.likelihood, generator=generator, **options)))
    first = 0 if known is None else known.shape[1]
    assert counts == list(range(first + 1, model.config.sequence_length + 1))
    return loop.images


@torch.no_grad()
@pytest.mark.parametrize("likelihood", ["categorical", "logistic_mixture"])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.999999}], ids=["plain", "from a table"])
def test_images_are_drawn_as_often_as_their_likelihood_says(likelihood, options):
    """Images of two values, in 4 × 4 cells of values: frequencies against all 65,536 probabilities."""
    model = build(image_height=1, image_width=2, likelihood=likelihood, hidden_size=8, num_hidden_layers=1)
    every = torch.cartesian_prod(torch.arange(256), torch.arange(256)).view(-1, 1, 2, 1)
    p = torch.cat([model(part).nats for part in every.split(16384)]).double().neg().exp()
    cells = p.view(4, 64, 4, 64).sum((1, 3)).flatten()
    drawn = images(model, 8000, **options).flatten(1).long() // 64
    found = torch.bincount(drawn[:, 0] * 4 + drawn[:, 1], minlength=16) / 8000
    assert cells.sum().item() == pytest.approx(1, abs=1e-4)
    assert (cells.max() / cells.min()) > 1.5  # or any loop would pass
    assert ((found - cells).abs() < 5 * (cells / 8000).sqrt()).all()


@torch.no_grad()
@pytest.mark.parametrize("attention", ["linear", "softmax"])
@pytest.mark.parametrize("rows", [0, 2, 4])
def test_what_is_known_stays_and_the_rest_follows_from_it(attention, rows):
    """Without chance, each value that was not given is the likeliest after those before it, as `forward` has them."""
    model = build(likelihood="categorical", attention=attention, num_channels=3, num_classes=2)
    given, labels = torch.randint(0, 256, (2, 4, 3, 3), dtype=torch.uint8), torch.tensor([0, 1])
    made = images(model, 2, known=upper_rows(given, rows), class_labels=labels, temperature=0)
    assert torch.equal(made[:, :rows], given[:, :rows])
    likeliest = model(made, labels).parameters.argmax(-1).view(made.shape)
    assert torch.equal(made[:, rows:].long(), likeliest[:, rows:])
    assert rows == 4 or not torch.equal(made[0, rows:], made[1, rows:])


def test_the_state_is_written_in_place_and_does_not_grow():
    model = build()
    loop = PixelLoop(model, 2)
    before = [layer.S.data_ptr() for layer in loop.state.layers]
    list(loop.draw(pixel_sampler(model.likelihood)))
    assert [layer.S.data_ptr() for layer in loop.state.layers] == before
    assert loop.state.position.tolist() == [12, 12]  # the start and all values but the last


def test_what_cannot_be_drawn():
    model = build()
    with pytest.raises(ValueError, match="top-p must be above 0"):
        pixel_sampler(model.likelihood, top_p=0)
    with pytest.raises(ValueError, match="temperature"):
        pixel_sampler(model.likelihood, temperature=-1)
    with pytest.raises(ValueError, match=r"known values are \(2, t\) with t up to 12.*; got \(3, 4\)"):
        PixelLoop(model, 2, known=torch.zeros(3, 4, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"got \(2, 13\)"):
        PixelLoop(model, 2, known=torch.zeros(2, 13, dtype=torch.uint8))
    model.head.bias.data[0] = torch.nan
    with pytest.raises(ValueError, match="logits are NaN"):
        images(model, 1)

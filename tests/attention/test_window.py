"""Window attention in models, and what it does not take."""

import pytest
import torch

from tarnn.attention import WindowAttention
from tarnn.decoding.fused import refusal
from tarnn.models import TarnnConfig, TarnnForCausalLM, TarnnModel, TarnnSeq2SeqConfig

SIZES = {
    "vocab_size": 30,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "initializer_range": 0.3,
}


def encoder(**options):
    torch.manual_seed(0)
    config = TarnnConfig(
        **SIZES, causal=False, attention="window", attention_options={"window": {"window": 3, **options}}
    )
    return TarnnModel(config).double().eval()


def moved(model, place):
    """Which outputs change with the token at this place."""
    ids = torch.randint(0, 29, (1, 40), generator=torch.Generator().manual_seed(1))
    other = ids.clone()
    other[:, place] += 1
    x, y = (model(tokens).last_hidden_state[0] for tokens in (ids, other))
    return set((x != y).any(-1).nonzero()[:, 0].tolist())


@torch.no_grad()
def test_an_encoder_sees_its_window_and_first_tokens():
    assert moved(encoder(), 20) == set(range(18, 23))
    assert moved(encoder(sinks=1), 0) == set(range(40))


@torch.no_grad()
def test_a_decoder_generates_from_a_state_of_constant_size():
    torch.manual_seed(0)
    config = TarnnConfig(**SIZES | {"num_hidden_layers": 2}, attention="window", position="rotary",
                         attention_options={"window": {"window": 4, "sinks": 1}})  # fmt: skip
    model = TarnnForCausalLM(config).double().eval()
    ids = torch.randint(0, 30, (2, 25))
    logits, state = model.prefill(ids[:, :12], model.new_state(2))
    size, expected = state.nbytes, model(ids).logits
    for i in range(12, 25):
        torch.testing.assert_close(logits, expected[:, i - 1].float())
        logits, state = model.step(ids[:, i], state, inplace=i % 2 == 0)
    assert state.nbytes == size
    words = model.generate(ids[:, :9], max_new_tokens=8, do_sample=False)
    assert torch.equal(words, model.generate(ids[:, :9], max_new_tokens=8, do_sample=False, use_cache=False))
    assert refusal(model, anywhere=True) is None


@pytest.mark.refusals
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "from 1 and from 0 on; got 0 and 0"),
        ({"sinks": -1}, "from 1 and from 0 on; got 128 and -1"),
        ({"context_size": 9}, 'take cross_attention="softmax"'),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        WindowAttention(16, 2, **{"causal": False} | options)


def test_an_encoder_decoder_needs_another_cross_attention():
    with pytest.raises(ValueError, match='take cross_attention="softmax"'):
        TarnnSeq2SeqConfig(**SIZES, attention="window")
    TarnnSeq2SeqConfig(**SIZES, attention="window", cross_attention="linear")


def test_options_of_a_config_are_names_numbers_or_lists_of_these():
    with pytest.raises(ValueError, match="sinks of 'window' is a name, a number"):
        TarnnConfig(**SIZES, attention="window", attention_options={"window": {"sinks": [{}]}})


def test_a_config_with_global_tokens_is_refused_by_name():
    with pytest.raises(ValueError, match=r"no option 'global_tokens'.*has been removed. Take `sinks` for first tokens"):
        TarnnConfig(**SIZES, attention="window", attention_options={"window": {"global_tokens": [0]}})

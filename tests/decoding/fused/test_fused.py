"""The fused step against `model.step`: the same numbers and states; fewer bits cost what they may; what it refuses."""

import re
from dataclasses import replace

import pytest
import torch
from support.step_models import FUNCTIONS, MAPS, SERVED, SERVED_IMAGES, image_model, map_model, text_model

from scripts.common.clock import with_threads
from tarnn.attention import LinearAttention
from tarnn.decoding.fused import FusedStep, refusal
from tarnn.decoding.pixels import PixelLoop, pixel_sampler
from tarnn.feature_maps import GeneralizedFeatures, GeneralizedRandomFeatures, OwnMap, names
from tarnn.kernels.cpu import library
from tarnn.kernels.cpu.products import FORMATS
from tarnn.models import TarnnForCausalLM

compiled = pytest.mark.skipif(not library.available(), reason="the compiled kernels are not there")


def new_states(model, batch):
    labels = {"class_labels": torch.arange(batch) % 2} if getattr(model.config, "num_classes", 0) else {}
    if isinstance(model, TarnnForCausalLM):
        labels = {"capacity": 64}
    return model.new_state(batch, **labels), model.new_state(batch, **labels)


def worst(x, y):
    """The largest difference, in units of the largest number."""
    return ((x - y).abs().max() / y.abs().max().clamp(min=1e-30)).item()


def differences(model, step, batch, steps, prompt=0):
    """Of the numbers that come out, and of the states behind: the worst of them all."""
    ids = torch.randint(0, 97, (prompt + steps, batch), generator=torch.Generator().manual_seed(1))
    ours, theirs = new_states(model, batch)
    if prompt:
        ours, theirs = (model.prefill(ids[:prompt].T, state)[1] for state in (ours, theirs))
    found = []
    for token in ids[prompt:]:
        got, ours = step(token, ours)
        expected, theirs = model.step(token, theirs)
        found.append(worst(got, expected))
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        found += [worst(x, b.tensors()[name]) for name, x in a.tensors().items() if x.numel()]
    assert torch.equal(ours.position, theirs.position)
    return max(found)


@compiled
@pytest.mark.parametrize("threads", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("batch", [1, 3, 17])
@pytest.mark.parametrize("kind", list(SERVED))
def test_text_is_that_of_the_model(kind, batch, threads):
    model = text_model(**SERVED[kind])
    with with_threads(threads):
        assert differences(model, FusedStep(model), batch, 40) < 2e-5


@compiled
def test_the_maps_that_a_model_can_have_are_all_tried():
    """But for those that it refuses."""
    assert {*MAPS, "generalized", "generalized_random", "clusters"} == set(names())
    assert "no map that is fitted by the call or of logarithms; got clusters" in refusal(
        text_model(feature_map="clusters")
    )


@compiled
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [*MAPS.items(), *((f"generalized{r}", {"function": f}) for r in ("", "_random") for f in FUNCTIONS)],
)
def test_every_map_is_that_of_the_model(name, options, grouped):
    """Normalised where it can be; of maps with parameters from data, these are others than at the start."""
    model = map_model(name, options, num_key_value_heads=2 if grouped else 4)
    assert differences(model, FusedStep(model), 3, 20, prompt=3) < 5e-5


@compiled
@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_a_long_cache_is_read_in_blocks(weights):
    """Keys beyond one block, some of them masked; the same bits for any number of threads and any batch."""
    model = text_model(attention=["softmax", "linear", "softmax"], position="rotary", num_key_value_heads=2)
    step, ids = FusedStep(model, weights), torch.randint(0, 97, (3, 1210))
    mask = torch.ones_like(ids)
    mask[1, :1100] = 0
    read, found = model.prefill(ids, model.new_state(3, capacity=1300), mask)[1], []
    for threads, rows in ((1, [0, 1, 2]), (3, [0, 1, 2]), (3, [1])):
        start = state = read.select(torch.tensor(rows))
        with with_threads(threads):
            for i in range(5):
                out, state = step(torch.full((len(rows),), i), state)
        found.append(out[rows.index(1)])
    expected = start
    for i in range(5):
        logits, expected = model.step(torch.tensor([i]), expected)
    assert worst(found[0], logits[0]) < (2e-5 if weights == "float32" else 5e-2)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@compiled
@pytest.mark.parametrize("weights", FORMATS)
def test_many_rows_take_their_inputs_in_blocks(weights):
    """To the last bit what each row is alone, with more inputs than a block has."""
    model = text_model(num_hidden_layers=1, intermediate_size=1100, mlp="gelu")
    step, ids = FusedStep(model, weights), torch.arange(17)
    out = step(ids, model.new_state(17))[0]
    assert all(torch.equal(out[i], step(ids[i : i + 1], model.new_state(1))[0][0]) for i in (0, 9, 16))


@compiled
@pytest.mark.parametrize("position", [3, 600])
def test_a_cache_in_bfloat16_costs_its_rounding_alone(position):
    """Both steps round what they write, and read the same numbers. A key that lies between two numbers may be rounded to
    either, which is much less than what all the roundings change."""
    model = text_model(attention=["softmax", "linear"], num_key_value_heads=2, num_hidden_layers=2)
    ids, step = torch.randint(0, 97, (2, position + 20)), FusedStep(model)
    logits = {}
    for kept in (None, torch.bfloat16):
        state = read = model.prefill(ids[:, :position], model.new_state(2, position + 20, kept))[1]
        assert state.layers[0].k.dtype == (kept or torch.float32)
        for token in ids[:, position:].T:
            logits["fused", kept], state = step(token, state)
            logits["model", kept], read = model.step(token, read)
    of_kept, of_whole = logits["model", torch.bfloat16], logits["model", None]
    assert worst(logits["fused", None], of_whole) < 2e-5
    assert worst(logits["fused", torch.bfloat16], of_kept) < worst(of_kept, of_whole) / 4
    assert worst(of_kept, of_whole) < 0.02


@compiled
def test_a_full_cache_is_refused():
    model = text_model(attention="softmax")
    step, state = FusedStep(model), model.new_state(1, capacity=1)
    _, state = step(torch.tensor([1]), state)
    with pytest.raises(ValueError, match="holds 1 positions, 1 are taken and 1 more"):
        step(torch.tensor([1]), state)


@compiled
@pytest.mark.parametrize("batch", [1, 3, 17])
@pytest.mark.parametrize("kind", list(SERVED_IMAGES))
def test_images_are_those_of_the_model(kind, batch):
    model = image_model(**SERVED_IMAGES[kind])
    assert differences(model, FusedStep(model), batch, model.config.sequence_length) < 2e-5


@compiled
def test_autograd_sees_what_a_step_writes():
    """Every tensor of the state is written in place, and its version says so: a backward that needs it is refused."""
    model = text_model()
    state = model.new_state(2)
    before = {name: x._version for name, x in state.tensors().items()}
    _, after = FusedStep(model)(torch.tensor([1, 2]), state)
    assert all(x._version > before[name] for name, x in after.tensors().items())


@compiled
@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8", "int4"])
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_threads(weights):
    model = text_model(hidden_size=72, head_dim=34)
    step, ids = FusedStep(model, weights), torch.randint(0, 97, (4, 70))
    expected = None
    for threads, batch in [(1, 1), (1, 70), (3, 1), (3, 20), (2, 70)]:
        state = model.new_state(batch)
        with with_threads(threads):
            for token in ids[:, :batch]:
                out, state = step(token, state)
        expected = out[0] if expected is None else expected
        assert torch.equal(out[0], expected)


@compiled
@pytest.mark.parametrize(
    ("weights", "low", "high"), [("bfloat16", 1e-4, 2e-2), ("int8", 1e-4, 5e-2), ("int4", 1e-3, 0.8)]
)
@pytest.mark.parametrize("model", [text_model(), image_model()], ids=["text", "image"])
def test_fewer_bits_are_near_and_not_the_same(model, weights, low, high):
    """Of the largest number: bfloat16 rounds by up to 0.4 %, int8 by up to 0.8 % of the largest weight, int4 by up to 7 % of
    the largest of 32."""
    assert low < differences(model, FusedStep(model, weights), 5, 12) < high


@compiled
@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8", "int4"])
def test_a_nan_comes_out_again(weights):
    """A model or a state that has diverged must not look like one that has not: bytes know no NaN."""
    model = text_model()
    state = new_states(model, 2)[0]
    state.layers[0].S[1, 0, 2, 1] = torch.nan
    logits, _ = FusedStep(model, weights)(torch.tensor([1, 2]), state)
    assert logits[0].isfinite().all()
    assert logits[1].isnan().all()


@compiled
def test_the_pixel_loop_draws_the_same_images():
    model = image_model()
    drawn = []
    for step in (model.step, FusedStep(model)):
        loop = PixelLoop(model, 4, step=step)
        list(loop.draw(pixel_sampler(model.likelihood, generator=torch.Generator().manual_seed(0))))
        drawn.append(loop.images)
    assert drawn[0].float().std() > 10
    assert torch.equal(*drawn)


@compiled
def test_another_state_is_seen():
    """The step remembers where a state's tensors are: not beyond the state."""
    model = text_model()
    step, token = FusedStep(model), torch.tensor([3, 5])
    first, second = model.new_state(2), model.new_state(2)
    expected = step(token, first, inplace=True)[0]
    step(token, first, inplace=True)
    assert torch.equal(step(token, second, inplace=True)[0], expected)
    with pytest.raises(ValueError, match=r"new_state\(3\)"):  # the same layers, and positions of more rows
        step(torch.tensor([3, 5, 7]), replace(second, position=torch.zeros(3, dtype=torch.int64)), inplace=True)
    with pytest.raises(ValueError, match=r"new_state\(2\)"):
        step(token, replace(second, position=second.position.int()), inplace=True)
    again = second.select(torch.tensor([1, 0]))
    assert torch.equal(step(token, again)[0].flip(0), step(token.flip(0), second)[0])


def trained(model):
    """A step of AdamW in one kernel, as the Trainer takes it: torch counts no writes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()


def written(change):
    """Each way to write into all weights."""

    def write(model):
        for x in model.parameters():
            change(x)

    return write


CHANGES = {
    "trained": trained,
    "by .data": written(lambda x: x.data.mul_(2)),
    "loaded": lambda model: model.load_state_dict({name: 2 * x for name, x in model.state_dict().items()}),
    "of another type": lambda model: model.to(torch.bfloat16),
}


@compiled
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("position", ["rotary", "learned"])
def test_a_step_is_a_copy(change, position):
    """Whatever becomes of the model's weights, to the bit; a step that is made afterwards has those."""
    model = text_model(position=position, max_position_embeddings=40)
    step, token, state = FusedStep(model), torch.tensor([3]), model.new_state(1)
    before, after = (step(token, state, inplace=True)[0] for _ in range(2))
    CHANGES[change](model)
    again = model.new_state(1).map(lambda x: x.float() if x.is_floating_point() else x)
    assert torch.equal(step(token, again, inplace=True)[0], before)
    assert torch.equal(step(token, again, inplace=True)[0], after)
    model.float()
    new = FusedStep(model)(token, model.new_state(1))[0]
    expected = model.step(token, model.new_state(1))[0]
    assert torch.allclose(new, expected, rtol=1e-4, atol=1e-4)
    assert (new - before).norm() > 0.01 * before.norm() or change == "of another type"


@compiled
def test_what_does_not_fit_is_refused_before_anything_is_written():
    model = text_model(position="learned", max_position_embeddings=3)
    step, state = FusedStep(model), model.new_state(2)
    with pytest.raises(ValueError, match="a token must be from 0 to 96; got 97"):
        step(torch.tensor([1, 97]), state)
    with pytest.raises(ValueError, match=r"new_state\(3\)"):
        step(torch.tensor([1, 2, 3]), state)
    wide = replace(state, layers=state.map(torch.Tensor.double).layers)
    with pytest.raises(ValueError, match="contiguous and float32"):
        step(torch.tensor([1, 2]), wide)
    assert state.position.eq(0).all()
    assert all(x.S.eq(0).all() for x in state.layers)
    for _ in range(3):
        _, state = step(torch.tensor([1, 2]), state)
    with pytest.raises(ValueError, match="up to 3 tokens"):
        step(torch.tensor([1, 2]), state)


@compiled
def test_what_it_does_not_serve_it_says():
    """A map of one's own, a function of one's own, an attention of one's own."""

    class OwnAttention(LinearAttention):
        pass

    for phi in (OwnMap(torch.tanh), GeneralizedFeatures(torch.tanh), GeneralizedRandomFeatures(10, h=torch.sum)):
        model = text_model()
        model.model.layers[1].attention.feature_map = phi.eval()
        reason = f"model.layers.1.attention.feature_map ({type(phi).__name__}) is not the Elu that the config calls for"
        assert refusal(model) == reason
        with pytest.raises(ValueError, match=f"{re.escape(reason)}. Use model.step"):
            FusedStep(model)
    model = text_model()
    model.model.layers[1].attention = OwnAttention(24, 4, head_dim=10, causal=True).eval()
    assert (
        refusal(model) == "model.layers.1.attention (OwnAttention) is not the LinearAttention that the config calls for"
    )


@compiled
def test_models_elsewhere_or_in_training_are_not_served():
    assert refusal(text_model()) is None
    assert "on a CPU; some are torch.float64, on cpu" in refusal(text_model().double())
    assert "training mode" in refusal(text_model().train())
    assert "not for Linear" in refusal(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="float32, bfloat16, int8, int4; got 'int2'"):
        FusedStep(text_model(), "int2")


def test_without_compiled_kernels_it_says_so():
    with library.disabled():
        assert "the compiled kernels can't be used" in refusal(text_model())

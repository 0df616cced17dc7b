"""Models in bfloat16 and float16 by the fused step: to the bit what their copies in float32 give."""

import copy

import pytest
import torch
from support.step_models import MAPS, SERVED, SERVED_IMAGES, image_model, map_model, text_model

from tarnn.decoding.fused import FusedStep
from tarnn.decoding.loop import TokenLoop
from tarnn.decoding.samplers import sampler
from tarnn.kernels.cpu import library

pytestmark = pytest.mark.skipif(not library.available(), reason="the compiled kernels are not there")
TYPES = {torch.bfloat16: "bfloat16", torch.float16: "float32"}  # and the format of the weights by default
IDS = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(0))


def narrowed(model, dtype):
    """The model with its weights in 16 bits, and a copy of it in float32."""
    model = model.to(dtype)
    return model, copy.deepcopy(model).float()


def outputs(step, state, ids=IDS):
    """Logits of a prompt and of one token after it, and the state behind."""
    first, state = step.prefill(ids[:, :-1], state, every=True)
    last, state = step(ids[:, -1], state)
    return [first, last, *state.tensors().values()]


def check_alike(model, wide, weights=None, ids=IDS, **options):
    step, other = FusedStep(model, weights), FusedStep(wide, weights or TYPES[model.dtype])
    found, expected = (outputs(x, wide.new_state(len(ids), **options), ids) for x in (step, other))
    assert step.weights == other.weights
    assert found[0].std() > 1e-3
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", list(SERVED))
def test_text_is_that_of_the_model_in_float32(kind, dtype):
    check_alike(*narrowed(text_model(**SERVED[kind]), dtype), capacity=20)


@pytest.mark.parametrize("name", MAPS)
def test_every_map_is_described_in_float32(name):
    """What is computed of its parameters isn't rounded to their type."""
    check_alike(*narrowed(map_model(name, MAPS[name]), torch.bfloat16), capacity=20)


@pytest.mark.parametrize("weights", ["int8", "int4", "float32"])
def test_other_formats(weights):
    check_alike(*narrowed(text_model(position="sinusoidal"), torch.bfloat16), weights, capacity=20)


@pytest.mark.parametrize("kind", list(SERVED_IMAGES))
def test_images_are_those_of_the_model_in_float32(kind):
    model, wide = narrowed(image_model(**SERVED_IMAGES[kind]), torch.bfloat16)
    labels = {"class_labels": torch.tensor([0, 1])} if model.config.num_classes else {}
    check_alike(model, wide, ids=IDS % 8, **labels)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", list(SERVED))
def test_states_of_the_model_are_taken(kind, dtype):
    """Those that it makes itself, whose last inputs are in its type: a loop reads and writes as with the step's own."""
    model, wide = narrowed(text_model(**SERVED[kind]), dtype)
    kept = {"cache_dtype": torch.bfloat16} if dtype == torch.bfloat16 else {}
    texts = []
    for made, options in ((model, {}), (wide, kept)):
        loop = TokenLoop(model, made.new_state(2, 20, **options), step=FusedStep(model))
        loop.read(IDS)
        texts.append([*loop.tokens(sampler(temperature=0), 6), loop.logits])
    assert all(map(torch.equal, *texts))


@pytest.mark.parametrize("dtype", TYPES)
def test_the_table_of_embeddings_stays_in_its_type(dtype):
    model, _ = narrowed(text_model(), dtype)
    copied, shared = FusedStep(model), FusedStep(model, copy_tokens=False)
    tables = [step.runtime.packed.tables[0] for step in (copied, shared)]
    assert tables[0].dtype == dtype
    assert tables[0].data_ptr() != model.model.embed_tokens.weight.data_ptr() == tables[1].data_ptr()
    found, expected = (outputs(x, model.new_state(2)) for x in (shared, copied))
    assert all(map(torch.equal, found, expected))

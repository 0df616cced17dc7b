"""Programs of tarnn's own models compute what the models compute: in float64, whole and in pieces, for every kind there is."""

import subprocess
import sys

import pytest
import torch
from support.damaged_configs import check_refusals
from support.step_models import FUNCTIONS, MAPS, SERVED, SERVED_IMAGES, image_model, text_model

from tarnn.attention.registry import ATTENTIONS, DECAYS
from tarnn.errors import UserError
from tarnn.families.config import Config
from tarnn.families.own import images, text
from tarnn.families.weights import Weights
from tarnn.feature_maps import names
from tarnn.kernels.cpu import library
from tarnn.program.definition import new_states, run
from tarnn.program.extra import extra_rows
from tarnn.program.runtime import Runtime
from tarnn.program.state import tensors_of

UNREAD = ("position", ".fade", ".score", ".place")  # by programs: counted anew, or of keys that fade and of slots
EXACT = {"rtol": 1e-9, "atol": 1e-9}
TEXTS = {
    **SERVED,
    "two streams": {"reversible": True, "attention": ["linear", "softmax", "linear"], "position": "rotary"},
    "mamba2 without bias": {"attention": "mamba2"},
    "moved and not normalised": {
        "feature_map": "favor",
        "feature_map_options": {"favor": {"num_features": 24, "centre": True, "balance": True}},
        "normalize": False,
        "num_key_value_heads": 2,
    },
    "window": {
        "attention": ["window", "linear", "window"],
        "position": "rotary",
        "num_key_value_heads": 2,
        "attention_options": {"window": {"window": 3, "sinks": 2}},
    },
    "a window of all": {"attention": "window"},
    "none, grouped": {"attention": "none", "num_key_value_heads": 2, "bias": True},
}
KINDS = {
    **TEXTS,
    **{f"map {name}": {"feature_map": name, "feature_map_options": {name: options}} for name, options in MAPS.items()},
    **{
        f"map {name} of {function}": {"feature_map": name, "feature_map_options": {name: {"function": function}}}
        for name in ("generalized", "generalized_random")
        for function in FUNCTIONS
    },
}


def program_of(model, family=text):
    config = {key: x for key, x in model.config.to_dict().items() if x is not None}
    return family.program(Config(config), Weights.of(model.state_dict()))


def model_of(choices):
    """The model of a row, in float64; maps whose products may be negative are not normalised, and fitted ones are fitted."""
    choices = dict(choices)
    if choices.get("feature_map") in ("trigonometric", "gaussian", "identity") or "generalized" in str(choices):
        choices["normalize"] = False
    if choices.get("feature_map") == "cosformer":
        choices["max_position_embeddings"] = 64
    model = text_model(**choices).double()
    generator = torch.Generator().manual_seed(3)
    for name, x in model.named_buffers():
        if name.endswith(("_centre", "stretch", ".U")):
            x += 0.2 * torch.rand(x.shape, generator=generator)
        if name.endswith((".A", ".a")):
            x -= 0.1 * torch.rand(x.shape, generator=generator)
    return model


def same(program, ids, expected):
    """Compute all tokens at once, and in pieces of one token and of the rest; return the states after."""
    b, t = ids.shape
    extra = extra_rows(program, torch.arange(t).repeat(b))
    extra = None if extra is None else extra.unflatten(0, (b, t))
    states = new_states(program, b, dtype=torch.float64)
    whole, after = run(program, ids, states, positions=[0] * b, extra=extra, dtype=torch.float64)
    torch.testing.assert_close(whole, expected, **EXACT)
    pieces = []
    for part in (slice(0, 1), slice(1, 2), slice(2, t)):
        rows = None if extra is None else extra[:, part]
        out, states = run(program, ids[:, part], states, positions=[part.start] * b, extra=rows, dtype=torch.float64)
        pieces.append(out)
    torch.testing.assert_close(torch.cat(pieces, 1), expected, **EXACT)
    return after


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_texts_and_their_states(kind):
    model, ids = model_of(KINDS[kind]), torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(2))
    program = program_of(model)
    after = same(program, ids, model(ids).logits)
    if model.config.reversible:  # has no prefill
        return
    expected = model.prefill(ids, model.new_state(2, 9))[1].tensors()
    assert {f"layers.{x.layer}.{x.name}" for x in program.states} == {x for x in expected if not x.endswith(UNREAD)}
    for i, spec in enumerate(program.states):
        x, y = torch.stack([row[i] for row in after]), expected[f"layers.{spec.layer}.{spec.name}"]
        torch.testing.assert_close(x.to(y.dtype), y, **EXACT)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_16_bits_are_not_rounded_again(kind):
    """The program of a folder in bfloat16 computes with exactly its numbers."""
    model, ids = model_of(KINDS[kind]).bfloat16(), torch.randint(97, (1, 5), generator=torch.Generator().manual_seed(2))
    program = program_of(model)
    same(program, ids, model.double()(ids).logits)


@pytest.mark.skipif(not library.available(), reason="the compiled kernels are not there")
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_texts_compiled(kind):
    """The runtime is as near as float32 lets the model be; pieces change no bit; it goes on from a state of the model."""
    model, ids = model_of(KINDS[kind]), torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(2))
    exact, model = model(ids).logits, model.float()
    program = program_of(model)
    runtime, noise = Runtime(program), (model(ids).logits - exact).abs().max()
    logits, after = runtime.prefill(ids, runtime.new_state(2, 9), every=True)
    assert (logits - exact).abs().max() <= 4 * noise + 2e-6 * exact.abs().max()
    last, state = runtime.prefill(ids[:, :5], runtime.new_state(2, 9))
    for i in range(5, 9):
        assert torch.equal(last, logits[:, i - 1])
        last, state = runtime(ids[:, i], state)
    assert torch.equal(last, logits[:, 8])
    for x, y in zip(tensors_of(state, program), tensors_of(after, program), strict=True):
        assert torch.equal(x, y)
    if not model.config.reversible:
        _, before = model.prefill(ids[:, :8], model.new_state(2, 9))
        step = runtime(ids[:, 8], before)[0]
        assert (step - exact[:, 8]).abs().max() <= 8 * noise + 2e-6 * exact.abs().max()


@pytest.mark.parametrize("position", [None, "sinusoidal"])
@pytest.mark.parametrize("kind", SERVED_IMAGES)
@torch.no_grad()
def test_images(kind, position):
    choices = SERVED_IMAGES[kind] | ({} if position is None else {"position": position})
    model = image_model(**choices).double()
    labels = torch.tensor([1, 0]) if model.config.num_classes else None
    ids = torch.randint(256, (2, 7), generator=torch.Generator().manual_seed(2))
    ids[:, 0] = 256
    state, expected = model.new_state(2, class_labels=labels), []
    for i in range(7):
        parameters, state = model.step(ids[:, i], state)
        expected.append(parameters.double())  # rounded to float32
    program = program_of(model, images)
    states, classes = new_states(program, 2, dtype=torch.float64), program.instructions[0].weights.get("classes")
    condition = None if labels is None else classes[labels.repeat_interleave(7)]
    extra = extra_rows(program, torch.arange(7).repeat(2), condition)
    extra = None if extra is None else extra.unflatten(0, (2, 7))
    whole, _ = run(program, ids, states, positions=[0, 0], extra=extra, dtype=torch.float64)
    torch.testing.assert_close(whole.float().double(), torch.stack(expected, 1), rtol=1e-6, atol=1e-6)
    if library.available():
        model = model.float()
        runtime, state = Runtime(program_of(model, images)), model.new_state(2, class_labels=labels)
        read, _ = runtime.prefill(ids, state, every=True)
        torch.testing.assert_close(read.double(), whole, rtol=1e-4, atol=1e-4)


def test_classes_are_asked_for():
    for program, condition in (
        (program_of(image_model(), images), torch.ones(1, 16)),
        (program_of(image_model(num_classes=2), images), None),
    ):
        with pytest.raises(ValueError, match=r"this program has (no|2) classes; got (no|a) row of a class"):
            extra_rows(program, torch.arange(1), condition)


def test_every_kind_is_tried():
    attentions = {
        x
        for row in TEXTS.values()
        for x in [row.get("attention", "linear")]
        for x in ([x] if isinstance(x, str) else x)
    }
    assert attentions == set(ATTENTIONS.names())
    assert {row.get("decay", "token") for row in TEXTS.values()} == {"none", *DECAYS.names()}
    maps = {"generalized", "generalized_random", *MAPS}
    assert maps == set(names()) - {"clusters"}


REFUSED = {
    "a key that is not known": ({"heads_of_state": 3}, "heads_of_state = 3 is not known"),
    "another architecture": ({"architectures": ["TarnnForCTC"]}, "architectures must be .*CausalLM"),
    "a choice that there is not": ({"mlp": "moe"}, "mlp must be one of swiglu, gelu"),
    "a pattern that does not fit": ({"attention": ["linear", "softmax"]}, "multiple"),
    "an encoder": ({"causal": False, "decay": "none"}, "is of an encoder"),
    "another size": (
        {"intermediate_size": 48},
        r"mlp.up_proj.weight of shape \(40, 24\) where the config calls for \(48, 24\)",
    ),
    "more layers": ({"num_hidden_layers": 4}, "lacks the weights model.layers.3"),
    "fewer layers": ({"num_hidden_layers": 2}, "holds weights that its config does not call for: model.layers.2"),
    "negative weights": ({"feature_map": "identity"}, "may give negative weights"),
    "a map that is fitted by the call": (
        {"feature_map": "oprf", "feature_map_options": {"oprf": {"fit": "call"}}},
        "lacks|both sides",
    ),
    "rotated logarithms": ({"feature_map": "exp", "position": "rotary"}, "rotary positions go neither"),
    "an option that there is not": ({"attention_options": {"linear": {"sinks": 3}}}, "no option sinks = 3 in programs"),
    "clusters": ({"feature_map": "clusters"}, "lacks the weights"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_program_is_refused(case):
    changes, why = REFUSED[case]
    model = text_model()
    config = {key: x for key, x in model.config.to_dict().items() if x is not None}
    with pytest.raises(UserError, match=why):
        text.program(Config(config | changes), Weights.of(model.state_dict()))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["default", "hybrid", "channels", "delta and others", "mamba2", "window", "images"])
def test_damaged_configs_are_refused_in_a_sentence(kind):
    model = image_model(num_classes=2) if kind == "images" else model_of(KINDS[kind])
    check_refusals({**model.config.to_dict(), "architectures": [type(model).__name__]}, model.state_dict())


@pytest.mark.thorough
def test_folders_open_without_transformers(tmp_path):
    """A folder as `save_pretrained` writes it, read from its files."""
    kinds = {
        "text": model_of(KINDS["rwkv7 and others"]).float(),
        "maps": model_of(KINDS["channels"]).float(),
        "images": image_model(),
    }
    for name, model in kinds.items():
        model.save_pretrained(tmp_path / name)
    code = (
        "import sys; from tarnn.families.by_name import open_program; "
        "print(*[len(open_program(x).instructions) for x in sys.argv[1:]]); "
        "assert 'transformers' not in sys.modules"
    )
    folders = [str(tmp_path / name) for name in kinds]
    run_ = subprocess.run([sys.executable, "-c", code, *folders], capture_output=True, text=True, check=True)
    families = (text, text, images)
    expected = [
        len(program_of(model, family).instructions) for model, family in zip(kinds.values(), families, strict=True)
    ]
    assert run_.stdout.split() == [str(n) for n in expected]

"""First states: they are what is trained, the file begins each text from them, and a killed run goes on bit for bit."""

import pytest
import torch
from safetensors.torch import load_file
from support.tuning_examples import example, losses

import tarnn as package
from tarnn.conversion.opening import open_pretrained, patch
from tarnn.decoding.first_state import beginning_from
from tarnn.decoding.opening import open_step
from tarnn.errors import UserError
from tarnn.log import silent
from tarnn.serving.model import open_served, served_from
from tarnn.tuning.states import FirstStates, write_states
from tarnn.tuning.task import TuneTask

pytestmark = pytest.mark.filterwarnings("ignore")
OFTEN = ("Qwen3.5", "Mamba-2")
RECURRENT = ("Qwen3.5", "Qwen3.5 with images", "Qwen3-Next", "OLMo-hybrid", "Mamba", "Mamba-2")
FAMILIES = [pytest.param(x, marks=() if x in OFTEN else pytest.mark.slow) for x in RECURRENT]
IDS = torch.randint(0, 256, (1, 3), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def states_of(folder_of):
    """states_of(family) → its model with random first states."""

    def make(family):
        model = open_pretrained(folder_of(family), text_only=True)
        patch(model, silent)
        states = FirstStates(model).eval()
        torch.manual_seed(0)
        with torch.no_grad():
            for S in states.parameters():
                S.normal_(std=3)
        return states

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_begins_texts_from_what_was_trained(folder_of, states_of, tmp_path, family):
    states, path = states_of(family), tmp_path / "a.state"
    with torch.no_grad():
        theirs = states(input_ids=IDS, use_cache=False).logits[0, -1]
    write_states(path, list(states.states), open_step(folder_of(family)))
    lm = package.load(folder_of(family))
    begun = lm.open_state(path)
    assert (begun.position, begun.logits) == (0, None)
    ours = lm.read(IDS[0], begun).logits[0]
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()
    assert (lm.read(IDS[0]).logits[0] - theirs).abs().max() > 1e-3
    served = served_from(open_served(folder_of(family), name="plain"), path, "tuned")
    logits, _ = served.step.prefill(IDS, served.model.new_state(1, 3))
    assert torch.equal(logits[0], ours)
    assert served.key.fingerprint != open_served(folder_of(family)).key.fingerprint


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_examples_alone(states_of, family):
    states = states_of(family)
    examples = [example(n, 1) for n in (7, 12, 5)]
    gradients = []
    for pack, checkpointing in ((True, False), (True, True), (False, False)):
        if checkpointing:
            states.activation_checkpointing_enable()
        states.train()
        task = TuneTask(examples, [], 24, pack)
        for row in task.examples:
            batch = task.collate([row])
            with task.within_step(batch):
                states(**batch, num_items_in_batch=torch.tensor(24.0))["loss"].backward()
        gradients.append([S.grad for S in states.states])
        states.zero_grad()
        states.model.activation_checkpointing_disable()
    assert all(S.any() for S in gradients[0])
    for packed, checkpointed, alone in zip(*gradients):
        assert (packed - alone).abs().max() <= 2e-5 * alone.abs().max()
        assert (checkpointed - alone).abs().max() <= 2e-5 * alone.abs().max()
    assert all(x.grad is None for x in states.model.parameters())


def test_the_command(tarnn, folder_of, chats, tmp_path):
    folder, path = folder_of("Qwen3.5"), tmp_path / "a.state"
    options = ["--steps", 20, "--length", 48, "--learning-rate", 1.0, "--eval-every", 5]
    code, shown, err = tarnn("tune-state", folder, chats, "--out", path, *options)
    assert code == 0, err
    assert f"tarnn generate {folder} --state-in {path}" in shown
    values = losses(tmp_path / "a.state.run")
    assert values[-1] < values[0] - 0.05
    rest = ["--prompt", "red", "--max-new-tokens", 24, "--greedy"]
    code, plain, err = tarnn("generate", folder, *rest)
    code, tuned, err = tarnn("generate", folder, *rest, "--state-in", path)
    assert code == 0, err
    assert tuned != plain
    lm = package.load(folder)
    assert "".join(lm.generate("red", state=lm.open_state(path), max_new_tokens=24, temperature=0)) == tuned
    code, _, err = tarnn("generate", folder_of("Mamba-2"), "--state-in", path, *rest)
    assert (code, "was saved by another model" in err) == (2, True)
    assert tarnn("tune-state", folder, chats, "--out", path, *options, "--resume")[0] == 0  # nothing left to do
    code, _, err = tarnn("tune-state", folder_of("Llama"), chats, "--out", tmp_path / "b.state")
    assert (code, "has no layer whose first state can be tuned" in err) == (2, True)


def test_a_killed_run_goes_on_bit_for_bit(run_alone, folder_of, chats, tmp_path):
    folder = folder_of("Mamba-2")
    options = ["--length", "48", "--learning-rate", "0.1", "--eval-every", "4", "--steps", "12"]
    whole, cut = tmp_path / "whole.state", tmp_path / "cut.state"
    assert run_alone("tune-state", folder, chats, "--out", whole, *options) == 0
    assert run_alone("tune-state", folder, chats, "--out", cut, *options, moment="in a step", at=6) == -9
    assert not cut.exists()
    assert run_alone("tune-state", folder, chats, "--out", cut, *options, "--resume") == 0
    one, other = load_file(whole), load_file(cut)
    assert one.keys() == other.keys()
    assert all(torch.equal(x, other[name]) for name, x in one.items())


def test_states_that_are_not_first(folder_of, tmp_path):
    lm = package.load(folder_of("Qwen3.5"))
    lm.save(lm.read("some text"), tmp_path / "read.state")
    with pytest.raises(UserError, match="holds a state after 9 tokens; expected one before the first"):
        beginning_from(lm.opened, tmp_path / "read.state")


def test_names_of_the_server(tarnn, folder_of):
    folder = folder_of("Qwen3.5")
    code, _, err = tarnn("serve", folder, "--adapter", "no-path")
    assert (code, "expected a name for clients and a path" in err) == (2, True)
    code, _, err = tarnn("serve", folder, "--state", f"{folder.name}={folder}")
    assert (code, f"two models are called {folder.name}" in err) == (2, True)
    code, _, err = tarnn("serve", folder, folder_of("Mamba-2"), "--state", "a=b")
    assert (code, "--state goes with one model, and 2 folders were given" in err) == (2, True)

"""Training compiled by inductor, which lays out memory as the operators' fake kernels promise, and checks it."""

import pytest
import torch
from support.attention_cases import Case, relative_error
from transformers import Trainer, TrainingArguments

from tarnn import TarnnConfig, TarnnForCausalLM
from tarnn.ops import linear_attention

pytestmark = [
    pytest.mark.compile,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"),
]
SMALL = {"vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


def gradients(f, inputs) -> list[torch.Tensor]:
    o = f(*inputs)
    return [o, *torch.autograd.grad(o.square().sum(), inputs)]


@pytest.mark.slow
@pytest.mark.parametrize("channels", [False, True])
def test_decays_and_log_weights_of_any_strides(channels):
    """As a layer makes them of (b, t, g) numbers: seen from the side."""
    case = Case(b=2, g=2, r=2, t=9)
    shape = (2, 2, 5, 9) if channels else (2, 9, 2)
    inputs = [case.q, case.k, case.v, torch.randn(shape).double(), torch.randn(2, 9, 2).double()]
    inputs = [x.requires_grad_() for x in inputs]

    def attend(q, k, v, decay, weight):
        return linear_attention(q, k, v, causal=True, log_decay=-decay.abs().mT, key_log_weight=weight.mT)

    for x, y in zip(gradients(torch.compile(attend, fullgraph=True), inputs), gradients(attend, inputs)):
        assert relative_error(x, y) < 1e-9


@pytest.mark.slow
def test_the_trainer_with_torch_compile(tmp_path):
    ids = torch.randint(0, 11, (8, 9))
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        arguments = TrainingArguments(
            tmp_path,
            max_steps=3,
            per_device_train_batch_size=4,
            torch_compile=compiled,
            use_cpu=True,
            report_to="none",
            learning_rate=1e-2,
            logging_steps=1,
            disable_tqdm=True,
            save_strategy="no",
        )
        rows = [{"input_ids": x, "labels": x} for x in ids]
        trainer = Trainer(TarnnForCausalLM(TarnnConfig(**SMALL)), arguments, train_dataset=rows)
        trainer.train()
        losses.append([x["loss"] for x in trainer.state.log_history if "loss" in x])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_a_model_is_traced_whole_and_trains_as_it_does_without():
    """By another backend than inductor, which takes gradients' layouts as PyTorch's own operators promise them."""
    model = TarnnForCausalLM(TarnnConfig(**SMALL)).train()
    ids = torch.randint(0, 11, (2, 7))

    def gradients(forward):
        model.zero_grad()
        forward(input_ids=ids, labels=ids).loss.backward()
        return {name: x.grad for name, x in model.named_parameters()}

    expected = gradients(model)
    found = gradients(torch.compile(model, fullgraph=True, backend="aot_eager"))
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6)

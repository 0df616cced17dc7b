"""Models sharded by FSDP2 as the Trainer has them sharded by accelerate, which it does on GPUs alone; here by one process."""

from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import distributed
from torch.distributed.tensor import DTensor

from tarnn import models

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 20}
IDS = torch.arange(6).view(2, 3) + 1
MODELS = {
    "text": lambda: models.TarnnForCausalLM(models.TarnnConfig(**SIZES)),
    "masked": lambda: models.TarnnForMaskedLM(models.TarnnConfig(**SIZES, causal=False, decay="none")),
    "translation": lambda: models.TarnnForConditionalGeneration(models.TarnnSeq2SeqConfig(**SIZES)),
    "drawn": lambda: models.TarnnForCausalLM(models.TarnnConfig(**SIZES, feature_map="favor", decay="none")),
}


@pytest.fixture(scope="module")
def accelerator():
    """As much of one as `fsdp2_prepare_model` asks for."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield SimpleNamespace(mixed_precision="no", is_main_process=True, device=torch.device("cpu"))
    distributed.destroy_process_group()


@pytest.mark.parametrize("kind", MODELS)
def test_a_sharded_model_has_the_same_loss_and_gradients(accelerator, kind):
    torch.manual_seed(0)
    whole, sharded = MODELS[kind]().double(), MODELS[kind]().double()
    sharded.load_state_dict(whole.state_dict())
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator.state = SimpleNamespace(fsdp_plugin=plugin)
    sharded = fsdp2_prepare_model(accelerator, sharded)
    assert all(isinstance(x, DTensor) for x in sharded.parameters())
    losses = [2**20 * model(input_ids=IDS, labels=IDS).loss for model in (whole, sharded)]
    torch.testing.assert_close(*losses, check_dtype=False, rtol=1e-6, atol=0)  # transformers' own loss is float32
    for loss in losses:
        loss.backward()
    expected = dict(whole.named_parameters())
    for name, x in sharded.named_parameters():
        grad = expected[name].grad
        torch.testing.assert_close(x.grad.full_tensor(), grad, rtol=1e-5, atol=1e-5 * grad.abs().max().item())

"""FSDP2 on CPUs: accelerate shards on accelerators only, though what it prepares and what torch shards need none."""

from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainingArguments


def shard_on_cpu(accelerator: Accelerator, args: TrainingArguments) -> None:
    """Turn sharding on in an accelerator of CPU processes, in the way that it has for GPUs."""
    plugin = FullyShardedDataParallelPlugin(**args.fsdp_plugin_args)
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    accelerator.state.fsdp_plugin = plugin
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def local(parameter: Tensor) -> Tensor:
    """A parameter, or the shard of it that is here."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter

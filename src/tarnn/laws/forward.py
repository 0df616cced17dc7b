"""A live model by its own `forward`, as transformers' models are called: patched or not, converted, or ours."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.func import functional_call
from transformers import DynamicCache

from tarnn.decoding.memory import check_memory
from tarnn.errors import UserError
from tarnn.huggingface.patching.monkeypatch import owners
from tarnn.huggingface.patching.patch import known_layers
from tarnn.huggingface.versions import as_called, cache_of
from tarnn.laws.ways import LOGITS, Runner, Stages


class Forward(Runner):
    """Run a model by `forward(input_ids, attention_mask, …)`, in evaluation mode, which is up to who makes it."""

    def __init__(self, model: Any):
        if "input_ids" not in inspect.signature(model.forward).parameters and not hasattr(model, "peft_config"):
            raise UserError(f"a {type(model).__name__} has no forward that takes input_ids.")
        self.model = model
        changed = {id(x) for x in owners()}  # layers, or classes of them, that `patch_transformers` computes
        patched = any({id(x), id(type(x))} & changed for _, x in known_layers(model))
        about = [f"transformers {transformers.__version__}"] * type(model).__module__.startswith("transformers.")
        about += ["patched by tarnn"] * patched
        self.name = f"forward of {type(model).__name__}" + f" ({', '.join(about)})" * bool(about)
        inner = model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model
        self._forward = inner.forward
        self._has_positions = "position_ids" in inspect.signature(self._forward).parameters
        self.config = model.config
        text = self.config.get_text_config() if hasattr(self.config, "get_text_config") else self.config
        self.vocab_size, self.limit = text.vocab_size, getattr(text, "max_position_embeddings", None)
        fields = {**vars(self.config), **vars(text)}
        ids = [x for name, x in fields.items() if name.endswith("token_id")]
        self.special = frozenset(y for x in ids for y in (x if isinstance(x, list) else [x]) if isinstance(y, int))
        pad = fields.get("pad_token_id")
        self.pad_id = pad if isinstance(pad, int) and 0 <= pad < self.vocab_size else 0
        self.dtype = next((x.dtype for x in model.parameters() if x.is_floating_point()), torch.float32)

    def whole(self, ids: Tensor, mask: Tensor | None = None) -> Stages:
        options = {} if mask is None else self._options(ids, mask)
        return self._call(ids, {"use_cache": False, **options})[0]

    def read(self, ids: Tensor, past: Any = None, mask: Tensor | None = None) -> tuple[Stages, Any]:
        before, cache = past or (0, None)
        options = {} if mask is None else self._options(ids, mask, cache)
        if mask is None and self._has_positions:
            options["position_ids"] = torch.arange(before, before + ids.shape[1]).expand(ids.shape)
        options["use_cache"] = True
        stages, held = self._call(ids, options | as_called(self._forward, cache))
        if cache is None and held is None:  # a model that writes into a cache which it does not make
            cache = DynamicCache(config=self.config)
            stages, held = self._call(ids, options | as_called(self._forward, cache))
        return stages, (before + ids.shape[1], cache if held is None else held)

    def packed(self, rows: Sequence[Tensor], told: str) -> Stages:
        lengths = torch.tensor([len(x) for x in rows])
        options: dict[str, Any] = {}
        if told == "position_ids" or self._has_positions:
            options["position_ids"] = torch.cat([torch.arange(len(x)) for x in rows])[None]
        if told != "position_ids":
            bounds, longest = nn.functional.pad(lengths.cumsum(0), (1, 0)).int(), int(lengths.max())
            options |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
            options |= {"max_length_q": longest, "max_length_k": longest}
            options["seq_idx"] = torch.arange(len(rows)).repeat_interleave(lengths).int()[None]
        return self._call(torch.cat(list(rows))[None], {"use_cache": False, **options})[0]

    def exactly(self, ids: Tensor) -> Stages:
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        check_memory(sum(8 * x.numel() for x in tensors.values()), "weights in float64", "Take a smaller model.")
        weights = {name: x.detach().double() if x.is_floating_point() else x for name, x in tensors.items()}
        return self._call(ids, {"use_cache": False}, weights)[0]

    def _options(self, ids: Tensor, mask: Tensor, cache: Any = None) -> dict[str, Any]:
        """Return what `generate` passes for padded rows. Some models take no mask any more once they have a cache."""
        places = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        options: dict[str, Any] = {"attention_mask": mask} | ({"position_ids": places} if self._has_positions else {})
        prepare = getattr(self.model, "prepare_inputs_for_generation", None)
        if cache is not None and prepare is not None:
            more = {"use_cache": True, "is_first_iteration": False, **as_called(prepare, cache)}
            if prepare(ids, attention_mask=mask, **more).get("attention_mask") is None:
                del options["attention_mask"]
        return options

    def _call(
        self, ids: Tensor, options: dict[str, Any], weights: dict[str, Tensor] | None = None
    ) -> tuple[Stages, Any]:
        """Call the model; return its stages and its cache. weights: in the place of its own."""
        stages: Stages = {}
        device = next(self.model.parameters()).device
        options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
        options["input_ids"] = ids.to(device)
        handles = self._watch(stages, ids) if self.watching else []
        try:
            out = self.model(**options) if weights is None else functional_call(self.model, weights, (), options)
        finally:
            for handle in handles:
                handle.remove()
        stages[LOGITS] = list((out.logits if hasattr(out, "logits") else out[0]).cpu())
        return stages, cache_of(out)

    def _watch(self, stages: Stages, ids: Tensor) -> list[Any]:
        """Keep what layers and their parts put out, if it is one row of numbers per token. A module called again counts."""

        def note(name: str, out: Any) -> None:
            x = out[0] if isinstance(out, tuple | list) and out else out
            if isinstance(x, Tensor) and x.ndim == 3 and x.shape[:2] == ids.shape:
                calls = sum(known.partition(", ")[0] == name for known in stages)
                stages[f"{name}, call {calls + 1}" if calls else name] = list(x.detach().cpu())

        lists = [name for name, x in self.model.named_modules() if isinstance(x, nn.ModuleList)]
        layers = {name for name in lists if not any(name.startswith(f"{x}.") for x in lists)}
        parts = [(name.rpartition(".")[0], name, module) for name, module in self.model.named_modules()]
        return [
            module.register_forward_hook(lambda _, __, out, name=name: note(name, out))
            for above, name, module in parts
            if layers & {above, above.rpartition(".")[0]}
        ]

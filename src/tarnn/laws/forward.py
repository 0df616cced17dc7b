"""A live model by its own `forward`, as transformers' models are called: patched or not, converted, or ours."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.func import functional_call
from transformers import DynamicCache

from tarnn.decoding.memory import check_memory
from tarnn.huggingface.patching.monkeypatch import owners
from tarnn.huggingface.patching.patch import known_layers
from tarnn.huggingface.versions import as_called, cache_of
from tarnn.laws.ways import LOGITS, Stages


class Forward:
    """The `Runner` of a model with `forward(input_ids, attention_mask, …)`. It is put into evaluation mode by who makes it."""

    def __init__(self, model: Any, what: str):
        self.model = model
        home = f"transformers {transformers.__version__}" if type(model).__module__.startswith("transformers.") else ""
        patched = "patched by tarnn" if any(computed_by_tarnn(model)) else ""
        about = ", ".join(x for x in (home, patched) if x)
        self.name = f"{what} of {type(model).__name__}{f' ({about})' if about else ''}"
        inner = model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model
        self._forward = inner.forward
        self._has_positions = "position_ids" in inspect.signature(self._forward).parameters
        self.config = model.config
        text = self.config.get_text_config() if hasattr(self.config, "get_text_config") else self.config
        self.vocab_size: int = text.vocab_size
        fields = {**vars(self.config), **vars(text)}
        ids = (fields.get(x) for x in fields if x.endswith("token_id"))
        self.special = frozenset(
            x for ids in ids for x in (ids if isinstance(ids, list) else [ids]) if isinstance(x, int)
        )
        pad = fields.get("pad_token_id")
        self.pad_id = pad if isinstance(pad, int) and 0 <= pad < self.vocab_size else 0
        self.limit: int | None = getattr(text, "max_position_embeddings", None)
        self._weights: dict[str, Tensor] | None = None  # in the place of the model's own
        self.watching = False
        self._stages: Stages = {}

    @property
    def dtype(self) -> torch.dtype:
        return next((x.dtype for x in self.model.parameters() if x.is_floating_point()), torch.float32)

    def whole(self, ids: Tensor, mask: Tensor | None = None) -> Stages:
        options = {} if mask is None else self._options(ids, mask)
        return self._call(ids, use_cache=False, **options)[0]

    def read(self, ids: Tensor, past: Any = None, mask: Tensor | None = None) -> tuple[Stages, Any]:
        seen, cache = (0, None) if past is None else past
        if mask is None:
            places = torch.arange(seen, seen + ids.shape[1]).expand(ids.shape)
            options = {"position_ids": places} if self._has_positions else {}
        else:
            options = self._options(ids, mask, cache)
        stages, held = self._call(ids, use_cache=True, **as_called(self._forward, cache), **options)
        if cache is None and held is None:  # a model that writes into a cache which it does not make
            cache = DynamicCache(config=self.config)
            stages, held = self._call(ids, use_cache=True, **as_called(self._forward, cache), **options)
        return stages, (seen + ids.shape[1], cache if held is None else held)

    def packed(self, rows: Sequence[Tensor], told: str) -> Stages:
        lengths = torch.tensor([len(x) for x in rows])
        options: dict[str, Any] = {"position_ids": torch.cat([torch.arange(len(x)) for x in rows])[None]}
        if told != "position_ids":
            options = options if self._has_positions else {}
            bounds, longest = nn.functional.pad(lengths.cumsum(0), (1, 0)).int(), int(lengths.max())
            options |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
            options |= {"max_length_q": longest, "max_length_k": longest}
            options["seq_idx"] = torch.arange(len(rows)).repeat_interleave(lengths).int()[None]
        return self._call(torch.cat(list(rows))[None], use_cache=False, **options)[0]

    @contextmanager
    def watched(self) -> Iterator[None]:
        lists = [name for name, x in self.model.named_modules() if isinstance(x, nn.ModuleList)]
        layers = [name for name in lists if not any(name.startswith(f"{x}.") for x in lists)]
        up = lambda name: name.rpartition(".")[0]  # noqa: E731
        handles = [
            module.register_forward_hook(lambda _, __, out, name=name: self._note(name, out))
            for name, module in self.model.named_modules()
            if up(name) in layers or up(up(name)) in layers
        ]
        self.watching = True
        try:
            yield
        finally:
            self.watching = False
            for handle in handles:
                handle.remove()

    def exactly(self, ids: Tensor) -> Stages:
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        check_memory(sum(8 * x.numel() for x in tensors.values()), "weights in float64", "Take a smaller model.")
        self._weights = {name: x.detach().double() if x.is_floating_point() else x for name, x in tensors.items()}
        try:
            return self.whole(ids)
        finally:
            self._weights = None

    def _options(self, ids: Tensor, mask: Tensor, cache: Any = None) -> dict[str, Tensor]:
        """Return what `generate` passes for padded rows. Some models take no mask any more once they have a cache."""
        places = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        options = {"attention_mask": mask, **({"position_ids": places} if self._has_positions else {})}
        prepare = getattr(self.model, "prepare_inputs_for_generation", None)
        if cache is not None and prepare is not None:
            more = {"use_cache": True, "is_first_iteration": False, **as_called(prepare, cache)}
            if prepare(ids, attention_mask=mask, **more).get("attention_mask") is None:
                del options["attention_mask"]
        return options

    def _call(self, ids: Tensor, **options: Any) -> tuple[Stages, Any]:
        self._stages, self._shape = {}, ids.shape
        device = next(self.model.parameters()).device
        options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
        options["input_ids"] = ids.to(device)
        out = (
            self.model(**options) if self._weights is None else functional_call(self.model, self._weights, (), options)
        )
        self._stages[LOGITS] = list((out.logits if hasattr(out, "logits") else out[0]).cpu())
        return self._stages, cache_of(out)

    def _note(self, name: str, out: Any) -> None:
        """Keep what a module put out, if that is one row of numbers per token. A module that is called again counts."""
        x = out[0] if isinstance(out, tuple | list) and out else out
        if isinstance(x, Tensor) and x.ndim == 3 and x.shape[:2] == self._shape:
            calls = sum(known.partition(", ")[0] == name for known in self._stages)
            self._stages[f"{name}, call {calls + 1}" if calls else name] = list(x.detach().cpu())


def computed_by_tarnn(model: nn.Module) -> Iterator[nn.Module]:
    """Find the layers that `patch_transformers` computes, in this model or in all of their class."""
    changed = {id(x) for x in owners()}
    return (x for _, x in known_layers(model) if {id(x), id(type(x))} & changed)

"""The tables of model families that tarnn computes, in docs/families.md, from what the tests run.

python scripts/families_table.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "docs" / "families.md"
KINDS = {
    "decoder": "decoder of text",
    "encoder": "encoder of text",
    "vision": "encoder of images",
    "speech": "encoder of sound",
    "sequences": "encoder and decoder of text",
    "sequences of sound": "encoder of sound, decoder of text",
}
REASONS = {
    "position_bias": "adds a bias by position to the products",
    "mask of shape": "hands its bias by position as a mask",
}
NEXT = "**Next:** [a Qwen3.5-like model on a CPU](qwen.md), from its folder to a server and to LoRA.\n"
OF_ANY = "RMSNorm", "RMSNormGated", "MLP", "ForCausalLM"  # ends of names of modules that every family has
OPS = {  # by the function or method of transformers that is replaced
    "torch_chunk_gated_delta_rule": "delta_rule, a decay per head",
    "chunk_kimi_delta_attention": "delta_rule, a decay per channel",
    "mamba2_chunk_scan": "linear_attention, a decay per token",
    "mamba_selective_scan": "selective_scan",
    "MiniMaxLightningAttention.forward": "linear_attention, a constant decay",
    "xLSTMBackend.forward": "linear_attention, a decay and a log-weight per token",
    "RecurrentGemmaRecurrentBlock.forward": "short_convolution, diagonal_scan",
    "causal_conv1d_fn": "short_convolution",
}


def page() -> str:
    """The whole page."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    from scripts.opened_families import opened_families

    title = """# Model families

Does your model run, and by which way? Find its family in one of three tables: folders that open as they are, linear models of
transformers that tarnn speeds up, and softmax models that it converts.

The tables are made by `scripts/families_table.py` from what the tests run.
"""
    return f"{title}\n{opened_families()}\n{linear_families()}\n{hybrid_families()}\n{NEXT}"


def linear_families() -> str:
    """What patch_transformers replaces."""
    from support.linear_families import REFERENCE_IS_WRONG, WITHOUT

    from tarnn.huggingface.patching.families import FAMILIES

    def cell(name: str, way: str) -> str:
        return f"– ({WITHOUT[name, way]})" if (name, way) in WITHOUT else "yes"

    rows, wrong = [], []
    for family in FAMILIES:
        name, paths = family.name, [hook.path for hook in family.hooks]
        ops = ", ".join(OPS[path] for path in paths if path in OPS)
        layers = [path.partition(".")[0] for path in paths if path.endswith(".forward")]
        layer = next(x for x in layers if not x.endswith(OF_ANY))
        versions = f" (transformers {family.tested} alone)" * bool(family.tested)
        rows.append(f"| {name}{versions} | `{layer}` | {ops} | {cell(name, 'right')} | {cell(name, 'packed')} |")
    for reason in dict.fromkeys(REFERENCE_IS_WRONG.values()):
        names: dict[str, list[str]] = {}
        for (name, way), why in REFERENCE_IS_WRONG.items():
            if why == reason and (name, way) not in WITHOUT:
                names.setdefault(way, []).append(name)
        for way, families in names.items():
            everybody = "all others" if len(families) > len(FAMILIES) // 2 else ", ".join(families)
            wrong.append(f"| {WAYS[way]} | {everybody} | {reason} |")
    return f"""## Linear models: `tarnn.patch_transformers()`

For each family the tests take a tiny model with random weights, in float32, and compare its outputs with those of
transformers 5.23 and 5.24: of a row at once, of a prompt and then token by token, of several turns with one cache, and with
padding before a text. transformers computes each of these in several ways, which differ by rounding; tarnn's difference may
be twice the largest of theirs. All gradients are the same. `tests/huggingface` tests that, and `generate`, bfloat16,
autocast, gradient checkpointing, LoRA and torch.compile for some of them; and that Qwen3-Next (without experts), Mamba-2 and
OLMo-hybrid, trained with tarnn and saved by `save_pretrained`, write the same text without tarnn.

Padding behind a text and packed rows (`position_ids` that start anew, `cu_seq_lens_q` or `seq_idx`, as transformers' flattening
collator makes them) are compared with the rows one by one, packed rows in gradients too. transformers has neither on a CPU.

**Norms** (with a gate or without) and SwiGLU of Qwen3-Next, Qwen3.5, both with experts, OLMo-hybrid, Kimi Linear and LFM2 are
one node of autograd each, in 16 bits too, and rounded once. Norms gated by a sigmoid stay transformers'.

**In training** a model that gets labels makes no logits: its head and `ForCausalLMLoss` are computed together, by blocks of
rows. `outputs.logits`, or `outputs["logits"]`, are computed when they are read. This holds for all families but Inkling,
RecurrentGemma and xLSTM, whose logits are cut or bounded, and with images for Qwen3.5, with experts too, Qwen4-exp and
GLM-5-next. All logits are made as before in evaluation, with `return_dict=False`, for part of them (`logits_to_keep`), with a
loss of your own (the Trainer's label smoothing too), losses of routers or of the logits' size, and for a head with adapters, a
bias or hooks.

**Assisted generation** (an assistant, or `prompt_lookup_num_tokens`) gives the text that each model writes alone, in float32, and
`cache.crop(-n)` forgets up to 64 tokens that were read since `cache.activate_past_recording()`: all families but MiniMax,
RecurrentGemma and xLSTM, whose states are not in a cache of transformers' own. It refuses assistance for those, and for all
elsewhere than on a CPU. In 16 bits the text may differ where two tokens are nearly as likely, as with any model: several tokens
are multiplied at once.

| family | layer | computed by | padding behind a text | packed rows |
|---|---|---|---|---|
{chr(10).join(rows)}

Models that contain one of these as their text model follow: Qwen3.5 with images (tested), LFM2-VL, LFM3-VL, MiniCPM-V 4.6 and
4.7, MiniCPM-OCR, Nemotron-H Omni, Nemotron 3.5 Transcribe, Granite 4 Vision and GLM-5-next with images.

**The fused step** (`generate` as one call per token, see [generation](generation.md)) takes Qwen3-Next, Qwen3.5,
OLMo-hybrid, LFM2 and Mamba-2, in float32 and in 16 bits. `forward` computes the others: their `generate` has no hook for it.
`tarnn.load` opens most of them all the same, as folders or as live models.

In these cases transformers' own results are wrong; tests show it. tarnn's results equal those of each row alone and at once:

| what | families | why transformers is wrong there |
|---|---|---|
{chr(10).join(wrong)}

Rows that continue a cache may have padding among their new tokens: each row reads its own tokens alone. While a cache
records how to go back (`activate_past_recording`) such rows are refused.
RWKV-4 is computed as before.
"""


WAYS = {
    "left": "padding before a text",
    "right": "padding behind a text, then more tokens",
    "continued": "several new tokens with a cache",
}


def hybrid_families() -> str:
    """Whose attention tarnn's hybrid attention takes over."""
    from support.families import FAMILIES, REFUSED, inputs_of, model_of

    rows = []
    for name, family in sorted(FAMILIES.items(), key=lambda x: (list(KINDS).index(x[1].kind), x[0])):
        padded = [side for side in inputs_of(family.kind) if side != "whole"]
        cache = "yes" if family.kind == "decoder" else "–"
        rows.append(
            f"| {name} | `{type(model_of(family)).__name__}` | {KINDS[family.kind]} | {', '.join(padded) or '–'} | {cache} |"
        )
    refused = [f"| {name} | it {REASONS[words]} |" for name, (_, words) in REFUSED.items()]
    return f"""## Hybrid attention: `tarnn convert`

A tiny model with random weights of each family, as `tests/conversion` runs it: with a window as long as the input its outputs
equal those of torch's own attention, and they change when the window is short.
`padding` says on which sides it was tried. `constant cache`: whether `constant_cache(model)` generates with it.
Cross-attention and a model's own sliding-window layers stay as they are.

| family | class | kind | padding | constant cache |
|---|---|---|---|---|
{chr(10).join(rows)}

Refused by name when they are run:

| family | why |
|---|---|
{chr(10).join(refused)}
"""


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
    print(TARGET)

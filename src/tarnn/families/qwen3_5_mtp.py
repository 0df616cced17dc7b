"""The head of Qwen3.5 that expects the token after next (`mtp.`): one layer of softmax attention, with its own keys and values.

It reads the next token's embedding beside what the model's head read of this one, both normed, and ends in a head over the
first tokens alone: those of a byte-pair vocabulary are its most frequent ones.
"""

from tarnn.families.config import Config
from tarnn.families.parts import Heads, dense, rms, swiglu
from tarnn.families.qwen3_5 import gated_softmax
from tarnn.families.rope import rope_of
from tarnn.families.weights import Weights
from tarnn.program.instructions import Program
from tarnn.program.recording import Recorder, product

FREQUENT = 2**15  # tokens that drafts are made of
FC = "mtp.fc.weight"


def program(config: Config, weights: Weights) -> Program | None:
    """Write the program of the head; None where the folder has none. Each token comes with a row: zeros, then the hidden row.

    Raises UserError for a head that does not fit the model.
    """
    if FC not in weights:
        return None
    text = config.text()
    text.choice("mtp_num_hidden_layers", 1)
    text.choice("mtp_use_dedicated_embeddings", False)
    n, tokens, eps = text.size("hidden_size"), text.size("vocab_size"), text.number("rms_norm_eps", 1e-6, least=0)
    tied = text.flag("tie_word_embeddings", False)
    prefix = "model.language_model." if "model.language_model.embed_tokens.weight" in weights else "model."
    table = weights.get(f"{prefix}embed_tokens.weight", (tokens, n))
    out = table if tied else weights.get("lm_head.weight", (tokens, n))
    w = weights.under("mtp.")
    embedding, hidden = Recorder().embed(table, width=2 * n, rows=True).split(n, n)
    fc = w.get("fc.weight", (n, 2 * n))
    x = product(rms(embedding, w, "pre_fc_norm_embedding", eps, from_one=True), fc[:, :n])
    x = x + product(rms(hidden, w, "pre_fc_norm_hidden", eps, from_one=True), fc[:, n:])
    w, bias, sizes = weights.under("mtp.layers.0."), text.flag("attention_bias", False), Heads.of(text, n, 256)
    frequencies = rope_of(text, sizes.width, partial=0.25).frequencies()
    h = rms(x, w, "input_layernorm", eps, from_one=True)
    x = x + dense(
        gated_softmax(h, w.under("self_attn."), sizes, frequencies, eps, bias),
        w.under("self_attn."),
        "o_proj",
        n,
        bias=bias,
    )
    x = x + swiglu(
        rms(x, w, "post_attention_layernorm", eps, from_one=True), w.under("mlp."), text.size("intermediate_size")
    )
    return x.record.head(rms(x, weights.under("mtp."), "norm", eps, from_one=True), out[: min(tokens, FREQUENT)])

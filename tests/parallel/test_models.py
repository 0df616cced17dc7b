"""Whole models over sequences that several processes share: losses, logits and gradients of one process."""

from dataclasses import replace

import pytest
import torch
from support.attention_cases import relative_error
from support.model_stretches import Model, Rwkv, by_one, generated, joined, on_rank

CASES = {
    "language model": Model(),
    "rotated features": Model(config=(("position", "rotary"),), masked=True),
    "rotated queries and keys": Model(config=(("position", "rotary"), ("attention", "softmax")), masked=True),
    "half of the layers softmax": Model(config=(("attention", ("linear", "softmax")), ("position", "rotary"))),
    "learned positions": Model(config=(("position", "learned"), ("max_position_embeddings", 30)), masked=True),
    "sinusoids": Model(config=(("position", "sinusoidal"),)),
    "a decay per token": Model(config=(("decay", "token"),), masked=True),
    "cosFormer": Model(config=(("feature_map", "cosformer"), ("max_position_embeddings", 30))),
    "gradients computed again": Model(config=(("position", "rotary"),), checkpointed=True),
    "masked language model": Model("TarnnForMaskedLM", config=(("causal", False), ("position", "rotary"))),
    "labels of tokens": Model("TarnnForTokenClassification", config=(("causal", False),), masked=True),
    "labels of sequences": Model("TarnnForSequenceClassification", config=(("causal", False),), masked=True),
    "labels of sequences, unmasked": Model("TarnnForSequenceClassification", config=(("causal", False),)),
    "labels of sequences by the last token": Model("TarnnForSequenceClassification", masked=True),
    "a decay to either side": Model("TarnnForMaskedLM", config=(("causal", False), ("decay", "token")), masked=True),
    "several labels of sequences": Model(
        "TarnnForSequenceClassification", config=(("num_labels", 2), ("problem_type", "multi_label_classification"))
    ),
    "transcripts": Model("TarnnForCTC", config=(("causal", False), ("decay", "token")), masked=True),
    "transcripts of frames": Model(
        "TarnnForCTC", config=(("input_size", 3), ("subsampling", 4)), lengths=(8, 4, 0, 17), masked=True
    ),
    "transcripts of convolved frames": Model(
        "TarnnForCTC",
        config=(("input_size", 3), ("subsampling", 4), ("causal", False), ("front", "conv")),
        lengths=(8, 4, 0, 17),
        masked=True,
    ),
    "transcripts of convolved frames before": Model(
        "TarnnForCTC", config=(("input_size", 3), ("subsampling", 4), ("front", "conv")), lengths=(4, 0, 16, 19)
    ),
    "windows and a global token": Model(
        "TarnnForTokenClassification",
        config=(
            ("causal", False),
            ("attention", ("window", "linear")),
            ("attention_options", {"window": {"window": 3, "global_tokens": [0]}}),
            ("position", "rotary"),
        ),
        masked=True,
    ),
    "causal windows": Model(
        config=(("attention", "window"), ("attention_options", {"window": {"window": 3, "sinks": 1}}))
    ),
    "convolutions": Model(config=(("conv_kernel", 4),), masked=True),
    "convolutions to both sides": Model("TarnnForMaskedLM", config=(("causal", False), ("conv_kernel", 9))),
    "recurrences": Model(
        config=(("attention", ("gated_delta", "mamba2", "rwkv7")), ("num_hidden_layers", 3)), masked=True
    ),
    "reversible": Model(config=(("reversible", True), ("decay", "token"), ("position", "rotary")), masked=True),
    "reversible, softmax": Model(config=(("reversible", True), ("attention", ("softmax", "linear")))),
    "reversible, to both sides": Model(
        "TarnnForTokenClassification", config=(("causal", False), ("reversible", True), ("decay", "head")), masked=True
    ),
    "RWKV-7": Rwkv(),
}


def check(processes, case):
    whole = by_one(case)
    parts = joined(case, processes.run(on_rank, case, ranks=len(case.lengths)))
    assert parts.keys() == whole.keys()
    errors = {name: relative_error(parts[name], whole[name]) for name in whole}
    assert errors.pop("loss", 0.0) < 1e-6  # transformers computes losses in float32
    assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_one_process(processes, name):
    check(processes, CASES[name])


@pytest.mark.compile
@pytest.mark.parametrize("name", ["half of the layers softmax", "a decay to either side"])
def test_compiled_models_compute_the_same(processes, name):
    case = CASES[name]
    whole, parts = by_one(case), processes.run(on_rank, replace(case, compiled=True), ranks=4)
    parts = joined(case, parts)
    assert max(relative_error(parts[x], whole[x]) for x in whole if x != "loss") < 1e-12


def test_frames_that_are_cut_within_a_position(processes):
    case = replace(CASES["transcripts of frames"], lengths=(7, 5, 0, 17))
    for outcome in processes.outcomes(on_rank, case):
        assert outcome.kind == "ValueError"
        assert "got stretches that begin at [0, 7, 12, 12]" in outcome.message


@pytest.mark.parametrize("causal", [True, False])
def test_labels_of_packed_documents(processes, causal):
    check(processes, Model("TarnnForSequenceClassification", packed="cu_seqlens", config=(("causal", causal),)))


@pytest.mark.parametrize("option", ["conv_kernel", "reversible"])
def test_packed_documents_of_convolutions_and_of_reversible_layers(processes, option):
    check(processes, Model(packed="cu_seqlens", config=((option, 3 if option == "conv_kernel" else True),)))


@pytest.mark.parametrize("told", ["cu_seqlens", "position_ids", "seq_idx"])
@pytest.mark.parametrize("position", ["rotary", "none"])
def test_packed_documents_cross_ranks(processes, told, position):
    check(processes, Model(packed=told, config=(("position", position),)))


def test_packed_documents_of_rwkv(processes):
    check(processes, Rwkv(packed="cu_seqlens"))


@pytest.mark.parametrize(
    "name",
    ["rotated features", "half of the layers softmax", "learned positions", "convolutions", "recurrences", "RWKV-7"],
)
def test_a_long_prompt_is_read_by_all(processes, name):
    case = replace(CASES[name], prefill=True, labels=False)
    check(processes, case)
    check(processes, replace(case, masked=not case.masked, lengths=(3, 9)))


@pytest.mark.parametrize("name", ["rotated features", "half of the layers softmax", "convolutions", "recurrences"])
def test_each_rank_generates_behind_a_prompt_that_all_read(processes, name):
    case = replace(CASES[name], labels=False, masked=False)
    options = {"max_new_tokens": 6, "do_sample": False, "repetition_penalty": 1.3}
    whole = generated(None, 0, case, options)
    assert whole.shape == (2, 26)
    for lengths in (case.lengths, (3, 16, 1)):
        case = replace(case, lengths=lengths)
        parts = processes.run(generated, case, options, ranks=len(lengths))
        assert all(torch.equal(part, whole) for part in parts)


def test_what_generate_over_ranks_refuses(processes):
    case = Model(labels=False)
    for options, expected in (
        ({"num_beams": 2}, "got num_beams=2"),
        ({"inputs_embeds": torch.ones(1)}, "got inputs_embeds"),
    ):
        outcomes = processes.outcomes(generated, case, options)
        assert all(outcome.kind == "ValueError" and expected in outcome.message for outcome in outcomes), outcomes

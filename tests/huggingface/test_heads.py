"""Heads on the backbone: what they compute, and that padding, packing, saving and training don't change it."""

import re

import pytest
import torch
from torch.nn.functional import cross_entropy, ctc_loss
from transformers import (
    AutoConfig,
    AutoModelForAudioClassification,
    AutoModelForCTC,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    pipeline,
)

from tarnn.data.tokenizers import byte_tokenizer
from tarnn.models import (
    TarnnConfig,
    TarnnForCausalLM,
    TarnnForCTC,
    TarnnForMaskedLM,
    TarnnForSequenceClassification,
    TarnnForTokenClassification,
    TarnnModel,
)

SIZES = {
    "vocab_size": 37,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
FAVOR = {"feature_map": "favor", "feature_map_options": {"favor": {"num_features": 12}}}
BACKBONES = {
    "linear": {"causal": False},
    "favor": {"causal": False, "position": "rotary", **FAVOR},
    "softmax": {"causal": False, "attention": "softmax"},
    "causal": {},
}
HEADS = {
    "masked": (TarnnForMaskedLM, AutoModelForMaskedLM),
    "sequence": (TarnnForSequenceClassification, AutoModelForSequenceClassification),
    "token": (TarnnForTokenClassification, AutoModelForTokenClassification),
    "ctc": (TarnnForCTC, AutoModelForCTC),
}
CASES = [(head, kind) for head in HEADS for kind in BACKBONES if (head, kind) != ("masked", "causal")]
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def build(head, kind="linear", **options):
    torch.manual_seed(0)
    config = TarnnConfig(**SIZES | BACKBONES[kind] | {"num_labels": 5} | options)
    return HEADS[head][0](config).double().eval()


def labels_for(head, ids):
    return ids[:, 0] % 5 if head == "sequence" else ids[:, :2] if head == "ctc" else ids % 5


@torch.no_grad()
@pytest.mark.parametrize(("head", "kind"), CASES)
def test_padding_is_cutting(head, kind, ids):
    model, x = build(head, kind), ids(2, 9)
    mask = torch.arange(9) < torch.tensor([[9], [5]])
    padded = model(x.masked_fill(~mask, 0), attention_mask=mask.long()).logits[1]
    alone = model(x[1:, :5]).logits[0]
    torch.testing.assert_close(padded if head == "sequence" else padded[:5], alone, **CLOSE)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(("head", "kind"), CASES)
def test_what_stands_at_padding_is_not_read(head, kind, value, ids):
    """On either side, also where it is not a number: not by a head, a layer, or a gradient."""
    model, x = build(head, kind), ids(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = mask[0, 7:] = 0
    found = []
    for number in (0.5, value):
        x_embeds = model.model.embed_tokens(x).detach().masked_fill(mask[..., None] == 0, number)
        x_embeds.requires_grad_()
        logits = model(inputs_embeds=x_embeds, attention_mask=mask).logits
        real = logits if head == "sequence" else logits[mask.bool()]
        (gradient,) = torch.autograd.grad(real.square().sum(), x_embeds)
        found.append((real, gradient))
    assert all(map(torch.equal, *found))


@torch.no_grad()
@pytest.mark.parametrize(("head", "kind"), [x for x in CASES if x[0] != "ctc"])
def test_packing_is_a_loop(head, kind, ids):
    model, x = build(head, kind), ids(1, 12)
    packed = model(x, cu_seqlens=torch.tensor([0, 4, 5, 12], dtype=torch.int32)).logits
    alone = [model(one).logits for one in x.split([4, 1, 7], dim=1)]
    expected = torch.cat(alone, dim=0 if head == "sequence" else 1)
    torch.testing.assert_close(packed, expected, **CLOSE)
    by_positions = model(x, position_ids=torch.cat([torch.arange(n) for n in (4, 1, 7)])[None]).logits
    torch.testing.assert_close(by_positions, expected, **CLOSE)


@pytest.mark.parametrize(("head", "kind"), [(head, "linear") for head in HEADS])
def test_loss_is_its_formula(head, kind, ids):
    model, x = build(head, kind), ids(2, 9)
    labels = labels_for(head, x)
    out = model(x, labels=labels)
    logits = out.logits.float()
    if head == "ctc":
        logs = logits.log_softmax(-1).transpose(0, 1)
        expected = ctc_loss(logs, labels, torch.tensor([9, 9]), torch.tensor([2, 2]), blank=0)
    else:
        expected = cross_entropy(logits.flatten(0, -2), labels.flatten())
    torch.testing.assert_close(out.loss.float(), expected)
    if head in ("masked", "token"):
        none = model(x, labels=labels.index_fill(1, torch.arange(4), -100)).loss
        torch.testing.assert_close(none.float(), cross_entropy(logits[:, 4:].flatten(0, 1), labels[:, 4:].flatten()))
    assert model(x, labels=labels, return_dict=False)[0] == out.loss


@torch.no_grad()
def test_a_sequence_is_its_mean_or_its_last_token(ids):
    for kind, stands in (("linear", lambda x: x.mean(1)), ("causal", lambda x: x[:, -1])):
        model, x = build("sequence", kind), ids(2, 9)
        torch.testing.assert_close(model(x).logits, model.classifier(stands(model.model(x).last_hidden_state)))


@torch.no_grad()
@pytest.mark.parametrize("head", HEADS)
def test_saved_and_loaded_by_the_auto_class(head, ids, tmp_path):
    model, x = build(head), ids(2, 6)
    model.save_pretrained(tmp_path)
    loaded = HEADS[head][1].from_pretrained(tmp_path)
    assert type(loaded) is HEADS[head][0]
    torch.testing.assert_close(loaded(x).logits, model(x).logits, rtol=0, atol=0)
    body = TarnnModel.from_pretrained(tmp_path)
    torch.testing.assert_close(body(x).last_hidden_state, model.model(x).last_hidden_state, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # which peft asks for
@pytest.mark.parametrize("head", HEADS)
def test_checkpointed_gradients_and_lora(head, ids):
    from peft import LoraConfig, get_peft_model

    model, x = build(head).train(), ids(2, 9)
    labels = labels_for(head, x)
    model(x, labels=labels).loss.backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.activation_checkpointing_enable()
    model(x, labels=labels).loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, plain[name], **CLOSE)
    model.activation_checkpointing_disable()
    model.zero_grad()
    lora = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    lora(input_ids=x, labels=labels).loss.backward()
    trained = [name for name, p in lora.named_parameters() if p.grad is not None and p.grad.any()]
    assert trained
    assert all("lora_B" in name for name in trained)


class TestFrames:
    """Frames in place of tokens, some neighbours to a place."""

    @staticmethod
    def model(head="ctc", **options):
        return build(head, **{"input_size": 3, "subsampling": 2, **options})

    def test_the_loss_knows_the_lengths(self):
        model, frames = self.model(), torch.randn(2, 11, 3).double()
        mask = torch.arange(11) < torch.tensor([[11], [5]])
        labels = torch.tensor([[4, 4, 7], [9, -100, -100]])
        out = model(input_features=frames, attention_mask=mask, labels=labels)
        logs = out.logits.float().log_softmax(-1).transpose(0, 1)
        expected = ctc_loss(logs, torch.tensor([4, 4, 7, 9]), torch.tensor([6, 3]), torch.tensor([3, 1]), blank=0)
        torch.testing.assert_close(out.loss.float(), expected)

    @torch.no_grad()
    def test_saved_and_loaded(self, tmp_path):
        for head, auto in (("ctc", AutoModelForCTC), ("sequence", AutoModelForAudioClassification)):
            model, frames = self.model(head), torch.randn(1, 4, 3).double()
            model.save_pretrained(tmp_path / head)
            loaded = auto.from_pretrained(tmp_path / head)
            assert loaded.main_input_name == "input_features"
            torch.testing.assert_close(
                loaded(input_features=frames).logits, model(input_features=frames).logits, **CLOSE
            )

    def test_refusals(self):
        model, frames = self.model(), torch.randn(1, 4, 3).double()
        with pytest.raises(ValueError, match=r"reads frames \(b, t, 3\).*got .*\(1, 4, 2\)"):
            model(input_features=frames[..., :2])
        with pytest.raises(ValueError, match="with padding before frames"):
            model(input_features=frames, attention_mask=torch.tensor([[0, 1, 1, 1]]))
        with pytest.raises(ValueError, match="row 0 has 2 positions for 3 labels"):
            model(input_features=frames, labels=torch.tensor([[5, 5]]))
        with pytest.raises(ValueError, match="this model reads tokens"):
            build("ctc")(input_features=frames)


def test_configs_that_have_no_meaning(ids):
    with pytest.raises(ValueError, match="predicts tokens from both sides: its config has causal=False"):
        TarnnForMaskedLM(TarnnConfig(**SIZES))
    with pytest.raises(ValueError, match="sees those before the one that it predicts"):
        TarnnForCausalLM(TarnnConfig(**SIZES, causal=False))
    with pytest.raises(ValueError, match="CTC needs a blank"):
        TarnnForCTC(TarnnConfig(**SIZES | {"pad_token_id": None}))
    with pytest.raises(ValueError, match="subsampling joins neighbouring frames"):
        TarnnConfig(**SIZES, subsampling=2)
    with pytest.raises(ValueError, match="no embedding that the output layer could share"):
        TarnnConfig(**SIZES, input_size=3, tie_word_embeddings=True)
    with pytest.raises(ValueError, match="give input_ids or inputs_embeds"):
        build("token")()
    with pytest.raises(ValueError, match="takes no packed documents"):
        build("ctc")(ids(1, 6), cu_seqlens=torch.tensor([0, 2, 6], dtype=torch.int32))


def test_pipelines():
    """Text in, labels and words out: by transformers, of a model of bytes."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": len(tokenizer), "causal": False, "pad_token_id": 256}
    labels = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
    model = TarnnForMaskedLM(TarnnConfig(**sizes))
    best = pipeline("fill-mask", model=model, tokenizer=tokenizer)("a<mask>c", top_k=2)
    assert [re.sub(r"(?s)^a(.*)c$", r"\1", x["sequence"]) for x in best] == [x["token_str"] for x in best]
    model = TarnnForSequenceClassification(TarnnConfig(**sizes, **labels))
    rows = pipeline("text-classification", model=model, tokenizer=tokenizer)(["abc", "a longer one"], batch_size=2)
    assert {row["label"] for row in rows} <= {"bad", "good"}
    model = TarnnForTokenClassification(TarnnConfig(**sizes, **labels))
    found = pipeline("token-classification", model=model, tokenizer=tokenizer, ignore_labels=[])("abc")
    assert [x["word"] for x in found] == ["a", "b", "c"]


def test_a_limit_of_tokens_can_be_given_as_a_model_is_loaded(tmp_path):
    """As sentence-transformers' config_kwargs do, which needs a number."""
    TarnnModel(TarnnConfig(**SIZES, causal=False)).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, max_position_embeddings=12)
    model = TarnnModel.from_pretrained(tmp_path, config=config)
    model.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).max_position_embeddings == 12
    with pytest.raises(ValueError, match="up to 12 tokens"):
        model(torch.ones(1, 13, dtype=torch.long))

"""Weights as the fused step keeps them, and its products with bytes against plain arithmetic with the same rounding."""

import pytest
import torch
from support.packed_weights import packed_groups, panels, rounded, rounded_groups
from support.rounded_model import share_alike

from tarnn.decoding.fused import FusedStep
from tarnn.kernels.cpu.products import FORMATS, PANEL, Block
from tarnn.models import TarnnConfig, TarnnForCausalLM
from tarnn.program.packing import LARGE_HEAD, VERSION


@pytest.mark.parametrize(("group", "multiple"), [(1, 1), (2, 32), (4, 64)])
def test_panels_hold_every_weight_once_and_zeros(group, multiple):
    outputs, inputs = 131, 30
    weight = torch.arange(1, outputs * inputs + 1).view(outputs, inputs)
    packed = panels(weight, group, multiple)
    assert packed.shape == (3, -(-inputs // multiple) * multiple // group, PANEL, group)
    for o, i in ((0, 0), (63, 29), (64, 1), (130, 17)):
        assert packed[o // PANEL, i // group, o % PANEL, i % group] == weight[o, i]
    assert packed.count_nonzero() == weight.numel()


def test_rounded_weights_are_within_half_a_step():
    weight = torch.randn(5, 70) * torch.tensor([1e-3, 1.0, 50.0, 0.0, 2.0])[:, None]
    whole, factor = rounded(weight)
    assert whole.dtype == torch.int8
    assert whole.abs().amax(-1).tolist() == [127, 127, 127, 0, 127]
    assert ((whole * factor[:, None] - weight).abs() <= factor[:, None] * 0.5001).all()


def test_groups_of_four_bits_are_within_half_a_factor_of_what_they_stand_for():
    weight = torch.randn(5, 70) * torch.tensor([1e-3, 1.0, 50.0, 0.0, 2.0])[:, None]
    whole, factors = rounded_groups(weight)
    assert (whole.shape, factors.shape, factors.dtype) == ((5, 3, 32), (5, 3), torch.bfloat16)
    assert (whole == whole.round()).all()
    assert -8 <= whole.amin() <= whole.amax() <= 7
    groups, wide = torch.nn.functional.pad(weight, (0, 26)).unflatten(1, (3, 32)), factors.float()[..., None]
    error = (whole * wide - groups).abs()
    # numbers beyond the last whole one are off by more
    assert (error <= wide.abs() * (0.501 + 2 * ((whole == -8) | (whole == 7)))).all()
    plain = (groups.gather(2, groups.abs().argmax(2, keepdim=True)) / -8).bfloat16().float()
    rounded_plainly = (groups / plain.where(plain != 0, 1.0)).round().clamp(-8, 7) * plain
    assert (error.square().sum(2) <= 1.0001 * (rounded_plainly - groups).square().sum(2)).all()


def test_four_bits_lie_where_the_kernel_reads_them():
    whole = torch.randint(-8, 8, (70, 2, 32)).float()
    factors = torch.randn(70, 2).bfloat16()
    block = packed_groups(whole, factors)
    assert block.shape == (2, 2, 128 + 1024)
    for o, g, i in ((0, 0, 0), (63, 1, 5), (64, 0, 31), (69, 1, 18)):
        panel, lane = divmod(o, PANEL)
        byte = block[panel, g, 128 + i // 8 * 256 + lane * 4 + i % 4].item()
        assert (byte >> 4 if i % 8 >= 4 else byte & 15) - 8 == whole[o, g, i]
        assert block[panel, g, :128].view(torch.bfloat16)[lane] == factors[o, g]
    assert (block[1, :, 128:].view(2, 4, PANEL, 4)[:, :, 6:] == 0x88).all()


@pytest.mark.usefixtures("compiled")
def test_a_block_says_where_each_thing_begins():
    block = Block(VERSION)
    block.numbers(True, 7)
    block.vector(torch.tensor([1.0, 2.0]))
    block.vector(None)
    block.matrix(torch.ones(3, 5), None, "int8")
    raw = block.bytes()
    version, length, size, _, seven, vector, nowhere, kind, inputs, outputs, at, bias, scale, sums = block.plan
    assert (seven, vector, nowhere, kind, inputs, outputs) == (7, 0, -1, 2, 5, 3)
    assert (version, length, size) == (VERSION, len(block.plan), len(raw))
    floats = raw.view(torch.float32)
    assert floats[:3].tolist() == [1, 2, 0]
    assert raw.view(torch.int8)[at : at + 4].tolist() == [127] * 4
    assert floats[bias // 4 : bias // 4 + 3].tolist() == [0, 0, 0]
    assert floats[scale // 4 : scale // 4 + 4].tolist() == pytest.approx([1 / 127] * 3 + [0])
    assert floats[sums // 4 : sums // 4 + 4].tolist() == pytest.approx([5, 5, 5, 0])
    assert all(place % 64 == 0 for place in (at, bias, scale, sums))


def as_defined(weight, kind):
    """The bytes of a matrix, and of its factors and sums."""
    if kind == "int8":
        whole, scale = rounded(weight)
        return panels(whole, 4, multiple=64), [scale, whole.float().sum(-1) * scale]
    if kind == "int4":
        whole, factors = rounded_groups(weight)
        return packed_groups(whole, factors), [(whole.sum(-1) * factors.float()).sum(-1)]
    if kind == "bfloat16":
        return panels(weight.bfloat16(), 2, multiple=32), []
    return panels(weight, group=1), []


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("in_turns", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("outputs", "inputs"), [(5, 1), (64, 32), (131, 70), (300, 201)])
def test_the_kernel_packs_as_the_definition_says(kind, in_turns, outputs, inputs):
    """Of rows that lie apart, beside others, and with a row and a group of zeros."""
    torch.manual_seed(inputs)
    weights = [torch.randn(outputs, inputs + 9)[:, :inputs], torch.randn(inputs, outputs).mT]
    weights[0][1] = 0
    weights[0][:, :32] = 0
    block = Block(VERSION)
    block.products([(weights[0], torch.ones(outputs)), (weights[1], None)], kind, in_turns=in_turns)
    whole = torch.cat(weights)
    if in_turns:
        whole = torch.stack([torch.nn.functional.pad(x, (0, 0, 0, -outputs % PANEL)) for x in weights])
        whole = whole.unflatten(1, (-1, PANEL)).transpose(0, 1).flatten(0, 2)
    packed, vectors = as_defined(whole, kind)
    raw, (_, _, _, _, got_inputs, got_outputs, *places) = block.bytes(), block.plan
    at, bias, *rest = (x for x in places if x >= 0)
    assert (got_inputs, got_outputs) == (inputs, len(whole))
    assert torch.equal(raw[at : at + packed.nbytes], packed.contiguous().view(-1).view(torch.uint8))
    assert raw[bias:].view(torch.float32)[: len(whole)].sum() == outputs
    for start, expected in zip(rest, vectors, strict=True):
        got = raw[start : start + 4 * -(-len(whole) // PANEL) * PANEL].view(torch.float32)
        torch.testing.assert_close(got[: len(whole)], expected, rtol=1e-6, atol=1e-5)
        assert not got[len(whole) :].any()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("batch", [1, 2, 5, 13, 60])
@pytest.mark.parametrize("width", [24, 72, 200])
def test_whole_numbers_are_the_model_with_rounded_weights_and_activations(kind, batch, width):
    """Widths that are no multiples of a vector, of a group or of a panel, and every way to divide rows into tiles."""
    torch.manual_seed(width)
    choices = {"norm_position": "post", "norm": "layer", "mlp": "gelu", "bias": True} if batch % 2 else {}
    model = TarnnForCausalLM(
        TarnnConfig(hidden_size=width, num_hidden_layers=1, num_attention_heads=4, initializer_range=0.2, **choices)
    ).eval()
    alike, worst = share_alike(model, FusedStep(model, kind), batch, steps=3 if batch > 20 else 9)
    assert alike > 0.6 or batch < 5
    assert worst < 0.02


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_large_head_is_in_int8_and_a_small_one_in_bfloat16(kind):
    torch.manual_seed(0)
    sizes = {}
    for vocabulary in (LARGE_HEAD - 1, LARGE_HEAD):
        model = TarnnForCausalLM(
            TarnnConfig(vocab_size=vocabulary, hidden_size=128, num_hidden_layers=1, num_attention_heads=4)
        ).eval()
        step = FusedStep(model, kind)
        assert share_alike(model, step, batch=13)[0] > 0.6
        sizes[vocabulary] = step.runtime.packed.block.numel()
    assert sizes[LARGE_HEAD - 1] - sizes[LARGE_HEAD] > 0.8 * 128 * LARGE_HEAD


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("in_turns", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs"), [(5, 1), (64, 32), (131, 70), (300, 201)])
def test_matrices_in_16_bits_are_packed_as_their_copies_in_float32(dtype, kind, in_turns, outputs, inputs):
    """Of rows that lie apart, and of columns that do; numbers of every size that the type has, the smallest ones too."""
    torch.manual_seed(inputs)
    sizes = 2.0 ** torch.randint(-26, 8, (outputs, 1))
    weights = [
        (sizes * torch.randn(outputs, inputs + 9)).to(dtype)[:, 3 : inputs + 3],
        torch.randn(inputs, outputs).to(dtype).mT,
    ]
    blocks = []
    for cast in (lambda x: x, torch.Tensor.float):
        block = Block(VERSION)
        block.products([(cast(x), None) for x in weights], kind, in_turns=in_turns)
        blocks.append(block.bytes())
    assert blocks[0].count_nonzero() > outputs * inputs / 4
    assert torch.equal(*blocks)


@pytest.mark.usefixtures("compiled")
def test_matrices_of_several_types_are_packed_as_float32():
    products = [(torch.randn(3, 5).to(dtype), None) for dtype in (torch.bfloat16, torch.float32, torch.float64)]
    blocks = [Block(VERSION), Block(VERSION)]
    blocks[0].products(products, "float32")
    blocks[1].products([(torch.cat([x.float() for x, _ in products]), None)], "float32")
    assert torch.equal(*(x.bytes() for x in blocks))


@pytest.mark.usefixtures("compiled")
def test_other_types_are_refused_by_the_operator():
    block = torch.zeros(2**16, dtype=torch.uint8)
    for wrong in ([torch.ones(3, 5).double()], [torch.ones(3, 5), torch.ones(3, 5).half()]):
        with pytest.raises(RuntimeError, match="all of one type"):
            torch.ops.tarnn_cpu.pack(wrong, False, 0, block, 0, -1, -1)

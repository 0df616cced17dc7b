"""Float32 products by another library: only where they stay as exact, and nothing of it is left behind."""

import threading
from contextlib import suppress

import pytest
import torch

import tarnn
from tarnn import matmul
from tarnn.matmul import FAST, HIGHEST, MIXED, choose, fast_matmul, precision_now, use_precision

LARGE = ((1024, 128, 192),)


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """torch as it is at its start, and a probe that remembers nothing."""
    monkeypatch.delenv(matmul.VARIABLE, raising=False)
    torch.set_float32_matmul_precision(HIGHEST)
    forget = matmul.error_ratio.cache_clear
    forget()
    yield
    forget()
    torch.set_float32_matmul_precision(HIGHEST)
    assert not matmul._entered


@pytest.fixture
def exact(monkeypatch):
    """A processor on which oneDNN multiplies in float32."""
    monkeypatch.setattr(matmul, "switches_library", lambda: True)
    monkeypatch.setattr(matmul, "error_ratio", lambda shapes: 1.5)


def rounded(a, b):
    """A product as a processor with units for bfloat16 makes it for oneDNN."""
    return (a.bfloat16() @ b.bfloat16()).float() if precision_now() == FAST else a @ b


def spoiled(a, b):
    return (a @ b).fill_(torch.nan if precision_now() == FAST else 0.0)


def test_what_is_chosen_here_keeps_the_error_of_float32():
    a, b = torch.randn(1024, 128), torch.randn(128, 192)
    errors = []
    for precision in (HIGHEST, choose(LARGE).precision):
        with use_precision(precision):
            errors.append((a @ b - a.double() @ b.double()).square().mean().sqrt())
    assert errors[1] <= matmul.BOUND * errors[0]


@pytest.mark.parametrize("multiply", [rounded, spoiled])
def test_a_processor_that_rounds_or_errs_is_refused(monkeypatch, multiply):
    monkeypatch.setattr(matmul, "switches_library", lambda: True)
    monkeypatch.setattr(matmul, "multiply", multiply)
    choice = choose(LARGE)
    assert choice.precision == HIGHEST
    assert "times the error of torch's default" in choice.why
    with fast_matmul(LARGE):
        assert precision_now() == HIGHEST


def test_the_probe_says_the_same_twice_and_draws_nothing_from_the_callers_numbers():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    before = matmul.error_ratio(LARGE)
    matmul.error_ratio.cache_clear()
    with torch.autocast("cpu", torch.bfloat16):  # which would round both
        assert matmul.error_ratio(LARGE) == before
    assert torch.equal(torch.rand(1), expected)
    assert precision_now() == HIGHEST


@pytest.mark.usefixtures("exact")
def test_as_a_call_and_as_a_context():
    with tarnn.fast_matmul() as outer:
        assert (precision_now(), outer.precision) == (FAST, FAST)
        with use_precision(HIGHEST):
            assert precision_now() == HIGHEST
            with suppress(KeyError), fast_matmul():
                assert precision_now() == FAST
                raise KeyError
            assert precision_now() == HIGHEST
        assert precision_now() == FAST
    assert precision_now() == HIGHEST
    called = fast_matmul()
    assert precision_now() == FAST
    with fast_matmul():
        pass
    assert precision_now() == FAST
    assert repr(called) == "fast_matmul(precision='medium': oneDNN in float32, which keeps its precision here)"
    for _ in range(2):  # an object may be entered again
        with called:
            assert precision_now() == FAST
        assert precision_now() == HIGHEST


@pytest.mark.parametrize("shapes", [4, (), [(1, 2)], ((16, 0, 3),), [(16, 2.5, 3)], "abc"])
def test_shapes_that_are_none(shapes):
    with pytest.raises(ValueError, match=r"shapes are \(rows, inputs, outputs\) of products, .*; got"):
        fast_matmul(shapes)


@pytest.mark.usefixtures("exact")
def test_contexts_of_two_threads_may_overlap():
    entered, left = threading.Event(), threading.Event()

    def other():
        with fast_matmul():
            entered.set()
            left.wait(60)

    with fast_matmul():
        thread = threading.Thread(target=other)
        thread.start()
        entered.wait(60)
    assert precision_now() == FAST  # the other is still at it
    left.set()
    thread.join()
    assert precision_now() == HIGHEST


@pytest.mark.usefixtures("exact")
def test_what_the_caller_has_set_stays():
    torch.set_float32_matmul_precision("high")
    with fast_matmul() as products:
        assert (precision_now(), products.why) == ("high", "set in torch by the caller")
    assert precision_now() == "high"
    torch.set_float32_matmul_precision(HIGHEST)
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # torch has no word for this
    with fast_matmul() as products, use_precision(products.precision):
        assert (products.precision, torch.backends.mkldnn.matmul.fp32_precision) == (MIXED, "bf16")
    assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"


def test_what_is_chosen_follows_from_shapes_device_and_record(exact, monkeypatch):
    assert choose(LARGE).precision == FAST
    assert choose(((16, 32, 32),)).precision == choose(()).precision == choose(LARGE, "cuda").precision == HIGHEST
    assert choose(LARGE, recorded=HIGHEST) == (HIGHEST, "as recorded", "")
    small = choose(((16, 32, 32),), recorded=FAST)  # what goes on goes on as it began
    assert (small.precision, small.note) == (FAST, "")
    monkeypatch.setenv(matmul.VARIABLE, "off")
    off = choose(LARGE, recorded=FAST)
    assert off.precision == HIGHEST
    assert off.note == (
        "float32 products were computed with precision 'medium' before; here they are with 'highest' "
        "(TARNN_FAST_MATMUL=off), so results may differ in their last bits"
    )
    monkeypatch.setenv(matmul.VARIABLE, "fast")
    with pytest.raises(ValueError, match="TARNN_FAST_MATMUL=fast is not known; expected on or off"):
        choose(LARGE)


def test_a_processor_on_which_the_switch_does_nothing(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert choose(LARGE) == (HIGHEST, "torch would not use oneDNN on this processor", "")


def test_the_shapes_of_a_model():
    model = torch.nn.Sequential(torch.nn.Embedding(11, 3), torch.nn.Linear(3, 5), torch.nn.LayerNorm(5))
    model.append(torch.nn.Linear(5, 3)).append(torch.nn.Linear(3, 5))
    assert matmul.shapes_of(model, 7) == ((7, 3, 5), (7, 5, 3))
    assert matmul.mean_size(matmul.shapes_of(model, 7)) == 7 * 3 * 5

"""The drawn calls of `fuzz.py`: a few of them as they should be, and errors that it has to notice."""

import json
import sys
from dataclasses import replace

import fuzz
import pytest
import torch
from support import fuzz_calls


@pytest.fixture(autouse=True)
def threads_as_they_are(monkeypatch, request):
    """Two workers with two threads each are slower than one."""
    if "unsteady" not in request.node.name:
        monkeypatch.setattr(torch, "set_num_threads", lambda n: None)


def some_call(**wanted):
    """The first short drawn call that is as wanted."""
    calls = (fuzz_calls.draw(0, number) for number in range(10_000))
    return next(c for c in calls if 3 <= c.t <= 9 and c.e and all(getattr(c, n) == x for n, x in wanted.items()))


@pytest.mark.parametrize("op", ["linear", "convolution"])
def test_a_run_leaves_the_worst_of_its_calls(op, monkeypatch, tmp_path):
    out, found = tmp_path / "fuzz.json", []
    monkeypatch.setattr(sys, "argv", ["fuzz.py", op, "--calls", "3", "--first", "2", "--out", str(out)])
    share = fuzz.share
    monkeypatch.setattr(fuzz, "share", lambda *given: found.append(share(*given)) or found[-1])
    try:
        assert fuzz.main() == 0
        assert json.loads(out.read_text())["largest_share"] == max(found) <= 1
        monkeypatch.setattr(fuzz, "share", lambda op, seed, number, report: 1.5 * (number == 3))
        assert fuzz.main() == 1
        assert json.loads(out.read_text())["over_their_limit"] == {"3": 1.5}
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("dtype", "error"), [("float64", 1e-10), ("float32", 1e-5), ("bfloat16", 0.05), ("float16", 0.01)]
)
def test_outputs_that_are_a_little_off_are_noticed(monkeypatch, dtype, error):
    drawn = replace(some_call(way="whole", feature_map="elu", normalize=True, weighted=False), dtype=dtype)
    assert fuzz.judge(drawn)[2] == ""
    op = fuzz_calls.linear_attention
    monkeypatch.setattr(fuzz_calls, "linear_attention", lambda *x, **more: scaled(op(*x, **more), 1 + error))
    assert "o: error" in fuzz.judge(drawn)[2]


def scaled(results, factor):
    o, state = results
    return o * factor, state


def test_gradients_that_are_missing_are_noticed(monkeypatch):
    drawn = some_call(way="continued", causal=True, state_grads=False, decay="none")
    drawn = replace(drawn, dtype="float64", masked=False, junk="", s=9, t=9)
    op = fuzz_calls.linear_attention

    def forgetful(q, k, v, *args, state=None, **more):
        return op(q, k, v, *args, state=state and state.map(torch.detach), **more)

    assert fuzz.judge(drawn)[2] == ""
    monkeypatch.setattr(fuzz_calls, "linear_attention", forgetful)
    assert "gradients: error" in fuzz.judge(drawn)[2]


def test_a_look_ahead_and_unsteady_bits_are_noticed(monkeypatch):
    """Both changes are far below any rounding that is allowed."""
    op = fuzz_calls.linear_attention
    drawn = some_call(dtype="float32", way="whole", causal=True, feature_map="elu", masked=False, decay="none")
    call = fuzz_calls.Call(replace(drawn, number=1))
    ahead = lambda q, k, v, *x, **more: scaled(op(q, k, v, *x, **more), 1 + 1e-7 * (v[0, 0, -1, 0] > 2.9))  # noqa: E731
    monkeypatch.setattr(fuzz_calls, "linear_attention", ahead)
    assert fuzz.to_the_bit(call, call.ours()) == ["an output depends on what comes later"]
    call = fuzz_calls.Call(replace(drawn, number=0))
    unsteady = lambda *x, **more: scaled(op(*x, **more), 1 + 1e-7 * torch.get_num_threads())  # noqa: E731
    monkeypatch.setattr(fuzz_calls, "linear_attention", unsteady)
    with fuzz.set_up(call.drawn):
        assert fuzz.to_the_bit(call, call.ours()) == ["another number of threads, other bits"]


def test_a_call_that_is_sensitive_to_rounding_is_judged_by_its_own_sensitivity():
    """Here one query's only feature is 0.02, the rest of sums of size 10: calls with other numbers say nothing of it."""
    mine, limits, wrong = fuzz.judge(fuzz_calls.draw(11, 62))
    assert wrong == ""
    assert mine["gradients"] > 1e-5
    assert limits["gradients"] < 1e-3


def test_sums_of_one_term_after_the_other_may_round_more_than_sums_of_blocks():
    """64 features of one sign: the definition, whose sums are torch's, rounds a quarter as much."""
    assert fuzz.judge(fuzz_calls.draw(11, 815))[2] == ""


@pytest.mark.parametrize("number", [772, 1784, 2974, 6868, 8332, 9642])
def test_weights_that_are_no_normal_number_beside_the_largest_are_lost_in_rounding(number):
    """Some query sees only such keys: the kernels take their weights for 0, and eps is so large that it hardly shows."""
    assert fuzz.judge(fuzz_calls.draw(0, number))[2] == ""


def test_large_log_weights_and_scales_cost_no_accuracy():
    """8176: decays of log-weights of 55. 4343: outputs e^33 times their sums."""
    for number in (8176, 4343):
        assert fuzz.judge(fuzz_calls.draw(0, number))[2] == ""


def test_sixteen_bits_excuse_what_comes_of_them():
    """551: with one feature, a query's gradient is 0, but for the rounding of the output. 6538: outputs below float16's range."""
    for number in (551, 6538):
        assert fuzz.judge(fuzz_calls.draw(0, number))[2] == ""

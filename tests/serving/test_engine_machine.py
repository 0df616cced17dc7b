"""Whatever happens, in whatever order, every answer is what the token loop alone makes of its request, bit for bit."""

from functools import cache
from itertools import chain

import pytest
import torch
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule, run_state_machine_as_test
from support.open_folders import CONFIGS
from support.served import NO_ENDS, alone, answer, prompt

from tarnn.serving import pool, scheduler
from tarnn.serving.engine import Engine
from tarnn.serving.request import Request, Sampling
from tarnn.serving.store import StateStore

SAMPLINGS = [
    Sampling(temperature=0),
    Sampling(seed=7),
    Sampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, seed=2**64 - 1),
    Sampling(seed=3, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2, logit_bias={5: 2.0}),
]


def same(ours, theirs):
    pairs = zip(ours.layers, theirs.layers, strict=True)
    return all(torch.equal(x, b.tensors()[name]) for a, b in pairs for name, x in a.tensors().items())


class Machine(RuleBasedStateMachine):
    """An engine whose steps are run by hand, in this thread, so that each failure can be made again."""

    snapshots = Bundle("snapshots")
    open = Bundle("open")

    def __init__(self, model, stored):
        super().__init__()
        self.model, self.stored = model, stored
        self.store = self.new_store()
        self.engine = self.start()
        self.events = {}  # of each stream, its request's tokens so far by choice, and finishes

    def new_store(self, **options):
        return StateStore(self.model, **options) if self.stored else None

    def start(self):
        return Engine(self.model, store=self.store, max_rows=3, prefill_piece=8)

    def run(self, turns):
        with torch.no_grad():
            for _ in range(turns):
                self.engine.step()

    def submit(self, request):
        stream = self.engine.submit(request)
        self.events[stream] = [([], []) for _ in range(request.n)]
        return stream

    @rule(
        target=open,
        length=st.integers(1, 30),
        seed=st.integers(0, 2),
        most=st.integers(0, 25),
        way=st.sampled_from(SAMPLINGS),
        n=st.integers(1, 4),
        keep=st.booleans(),
        client=st.sampled_from("ab"),
        tenant=st.sampled_from("xy"),
        boundary=st.integers(0, 30),
        ends=st.sampled_from([NO_ENDS, frozenset({40, 80, 120, 160, 200})]),
    )
    def ask(self, length, seed, most, way, n, keep, client, tenant, boundary, ends):
        options = {"keep": keep, "client": client, "tenant": tenant, "boundaries": (boundary,), "end_ids": ends}
        return self.submit(Request(prompt(length, seed), most, way, n, **options))

    @rule(
        target=open, begin=snapshots, length=st.integers(0, 9), most=st.integers(0, 9), way=st.sampled_from(SAMPLINGS)
    )
    def go_on(self, begin, length, most, way):
        return self.submit(Request(prompt(length, 3), most, way, 2, begin=begin, keep=True, end_ids=NO_ENDS))

    @rule(turns=st.integers(1, 40))
    def work(self, turns):
        self.run(turns)

    @rule(target=snapshots, stream=open)
    def take(self, stream):
        return multiple(*self.collect(stream))

    @rule(stream=open)
    def cancel(self, stream):
        stream.cancel()

    @rule(lost=st.booleans())
    def restart(self, lost):
        """Everything that goes on is cancelled; the store is there again, or it is not."""
        self.engine.close()
        self.store = self.new_store() if lost else self.store
        self.engine = self.start()

    @rule()
    def evict(self):
        """The store has room for few states."""
        self.store = self.new_store(memory=100_000)
        self.engine.scheduler.store = self.store

    @invariant()
    def rows_are_where_they_belong(self):
        at_work = self.engine.scheduler
        choices = [*at_work.rows.choices, *at_work.ready, *chain(*at_work.paused.values())]
        assert len(set(map(id, choices))) == len(choices)
        assert not any(x.finish for x in choices)

    def collect(self, stream):
        """What is there; snapshots at the ends of answers."""
        kept = []
        for event in stream.take():
            tokens, finishes = self.events[stream][event.choice]
            assert not finishes
            tokens.extend(event.tokens)
            if event.finish:
                finishes.append(event.finish)
            if event.snapshot is not None:
                kept.append(event.snapshot)
                _, logits, state = self.expected(stream.request, event.choice)
                assert torch.equal(event.snapshot.logits, logits)
                assert same(event.snapshot.state, state)
        return kept

    def teardown(self):
        for _ in range(2000):
            self.run(1)
            for stream in self.events:
                self.collect(stream)
            if all(stream.over for stream in self.events):
                break
        for stream, choices in self.events.items():
            assert stream.over
            for choice, (tokens, [finish]) in enumerate(choices):
                expected = self.expected(stream.request, choice)[0]
                assert finish != "error"
                if finish == "cancelled":
                    expected = expected[: len(tokens)]
                assert tokens == expected
        assert not self.engine.step()
        stats = self.engine.stats
        assert stats.running == stats.ready == stats.paused == stats.waiting == stats.waiting_tokens == 0

    @cache  # noqa: B019
    def expected(self, request, choice):
        return alone(self.model, request, choice)


@pytest.mark.parametrize(
    ("kind", "stored"), [("decay", True), ("rotary", False), ("hybrid", True), ("Qwen3.5", True), ("Llama", True)]
)
def test_answers_of_any_history(served, kind, stored, monkeypatch):
    monkeypatch.setattr(scheduler, "MOST_UNREAD", 5)
    monkeypatch.setattr(scheduler, "LOOK", 2)
    monkeypatch.setattr(pool, "LEAST_ROOM", 3)  # caches are often full
    run_state_machine_as_test(
        lambda: Machine(served(kind), stored),
        settings=settings(
            max_examples=15, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.parametrize("weights", ["float32", "int8"])
@pytest.mark.parametrize("kind", ["linear", "decay", "rotary", "log-weighted", "hybrid", *CONFIGS])
def test_equals_the_token_loop_alone(engine, served, kind, weights):
    one = engine(kind, weights, max_rows=5, prefill_piece=16)
    requests = [
        Request(prompt(1 + 7 * i, seed=i), 3 + i % 11, SAMPLINGS[i % 4], end_ids=NO_ENDS, keep=True, client=str(i % 3))
        for i in range(13)
    ]
    streams = [one.submit(request) for request in requests]
    for request, stream in zip(requests, streams):
        [(_, tokens, finish, snapshot)] = answer(stream)
        expected, logits, state = alone(served(kind, weights), request)
        assert (tokens, finish) == (expected, "length")
        assert torch.equal(snapshot.logits, logits)
        assert snapshot.tokens.tolist() == [*request.prompt, *tokens]
        assert same(snapshot.state, state)
        assert stream.usage == (len(request.prompt), 0, len(tokens))

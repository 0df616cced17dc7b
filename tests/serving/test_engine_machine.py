"""Whatever happens, in whatever order, every answer is what the token loop alone makes of its request, bit for bit."""

from functools import cache
from itertools import chain

import pytest
import torch
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule, run_state_machine_as_test
from support.served import NO_ENDS, alone, prompt

from tarnn.serving import scheduler
from tarnn.serving.engine import Engine
from tarnn.serving.request import Request, Sampling
from tarnn.serving.store import StateStore

SAMPLINGS = [
    Sampling(temperature=0),
    Sampling(seed=1),
    Sampling(seed=2, temperature=0.8, top_k=9, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.3),
]


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
                expected = self.expected(stream.request, event.choice)
                assert torch.equal(event.snapshot.logits, expected[1])
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


@pytest.mark.parametrize(("kind", "stored"), [("decay", True), ("rotary", False), ("hybrid", True)])
def test_answers_of_any_history(served, kind, stored, monkeypatch):
    monkeypatch.setattr(scheduler, "MOST_UNREAD", 5)
    monkeypatch.setattr(scheduler, "LOOK", 2)
    run_state_machine_as_test(
        lambda: Machine(served(kind), stored),
        settings=settings(
            max_examples=15, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )

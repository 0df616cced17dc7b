"""What Prometheus reads."""

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tarnn.serving.engine import Engine
from tarnn.serving.http.app import create_app
from tarnn.serving.http.operators import Histogram
from tarnn.serving.store import StateStore

from .conftest import running
from .test_completions import ASK


def numbers(http):
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {(s.name, s.labels.get("le")): s.value for family in families for s in family.samples}


def test_what_was_done_is_counted(client, http):
    before = numbers(http)
    for stream in (False, True):
        list(client.completions.create(**ASK, stream=stream, n=2))
    after = numbers(http)

    def grown(name, le=None):
        return after[name, le] - before[name, le]

    assert grown("tarnn:generation_tokens_total") == 48
    assert grown("tarnn:prompt_tokens_total") == 14
    assert grown("tarnn:num_requests_total") == 2
    assert grown("tarnn:time_to_first_token_seconds_count") == 2
    assert grown("tarnn:time_to_first_token_seconds_bucket", "+Inf") == 2
    long = ASK | {"max_tokens": 2000, "extra_body": {"ignore_eos": True}}  # which can't come in one piece
    list(client.completions.create(**long, stream=True))
    after = numbers(http)
    assert grown("tarnn:inter_token_latency_seconds_count") > 0
    assert after["tarnn:num_requests_running", None] == 0
    assert after["tarnn:num_requests_waiting", None] == 0


def test_states_are_counted(served):
    model = served("linear")
    with (
        Engine(model, store=StateStore(model)) as engine,
        running(create_app({"linear": engine})) as address,
        httpx.Client(base_url=address, timeout=60) as http,
    ):
        assert numbers(http)["tarnn:num_states_in_memory", None] == 0
        for _ in range(2):
            http.post("/v1/completions", json={"prompt": "Call me", "max_tokens": 1})
        after = numbers(http)
    assert after["tarnn:num_states_in_memory", None] > 0
    assert after["tarnn:state_memory_bytes", None] > 0
    assert after["tarnn:prefix_cache_hits_total", None] == 7
    assert after["tarnn:prefix_cache_queries_total", None] == 14
    assert (after["tarnn:state_hits_total", None], after["tarnn:state_misses_total", None]) == (1, 1)


def test_a_histogram_counts_what_is_at_most_a_bound():
    values = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 3.0):
        values.add(value)
    assert values.buckets() == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]
    assert values.sum == 6.0

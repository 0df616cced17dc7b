"""GET /metrics: what Prometheus reads, with the stems that vLLM and SGLang use."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily as Counter,
    GaugeMetricFamily as Gauge,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tarnn.serving.engine import Stats
from tarnn.serving.http.errors import ApiError
from tarnn.serving.http.times import Histogram
from tarnn.serving.stored import StoreStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# name, what it is, and its value by the engine's numbers; counters get the suffix _total
OF_ENGINES: tuple[tuple[type, str, str, Callable[[Stats], float]], ...] = (
    (Gauge, "num_requests_running", "Texts that are written now.", lambda x: x.running),
    (Gauge, "num_requests_ready", "Texts that wait for a row.", lambda x: x.ready),
    (Gauge, "num_requests_parked", "Texts whose reader is slow.", lambda x: x.parked),
    (Gauge, "num_requests_waiting", "Requests whose prompts are not read yet.", lambda x: x.waiting),
    (Gauge, "num_tokens_waiting", "Tokens of these.", lambda x: x.waiting_tokens),
    (Counter, "prompt_tokens", "Tokens of prompts, read or found.", lambda x: x.tokens_read + x.tokens_cached),
    (Counter, "prefix_cache_queries", "Tokens of prompts, as above.", lambda x: x.tokens_read + x.tokens_cached),
    (Counter, "prefix_cache_hits", "Tokens of prompts that were not read again.", lambda x: x.tokens_cached),
    (Counter, "generation_tokens", "Tokens written.", lambda x: x.tokens_written),
    (Counter, "num_requests", "Requests that were taken.", lambda x: x.requests),
    (Counter, "num_refused_requests", "Requests refused since the queue was full.", lambda x: x.refused),
    (Counter, "num_failed_requests", "Requests in which the model failed.", lambda x: x.errors),
)
OF_STORES: tuple[tuple[type, str, str, Callable[[StoreStats], float]], ...] = (
    (Gauge, "num_states_held", "States whose id a client has.", lambda x: x.held),
    (Gauge, "num_states_in_memory", "States that are kept in memory.", lambda x: x.memory_states),
    (Gauge, "state_memory_bytes", "Their bytes.", lambda x: x.memory_bytes),
    (Gauge, "num_states_on_disk", "States that are kept on the disk.", lambda x: x.disk_states),
    (Gauge, "state_disk_bytes", "Their bytes.", lambda x: x.disk_bytes),
    (Gauge, "state_disk_trouble", "1 while states can't be written to the disk.", lambda x: bool(x.trouble)),
    (Counter, "state_hits", "Prompts of which a beginning was kept.", lambda x: x.hits),
    (Counter, "state_misses", "Prompts of which none was.", lambda x: x.misses),
    (Counter, "states_evicted", "States that made room for others.", lambda x: x.evicted),
)


class Served(Collector):
    """Numbers of all engines and their stores, read when they are asked for."""

    def __init__(self, state: Any):
        self.state = state

    def collect(self) -> Iterator[Metric]:
        engines: dict[str, Any] = self.state.engines
        numbers = {name: engine.stats for name, engine in engines.items()}
        yield from families(OF_ENGINES, numbers)
        stores = {name: engine.store.stats for name, engine in engines.items() if engine.store is not None}
        yield from families(OF_STORES, stores)
        times = self.state.times
        yield histogram("time_to_first_token_seconds", "From a request to its first token.", times.first_tokens)
        yield histogram("inter_token_latency_seconds", "Between two tokens of a text.", times.gaps)


def families(table: Any, numbers: Mapping[str, Any]) -> Iterator[Metric]:
    for kind, name, text, value in table:
        metric = kind(f"tarnn:{name}", text, labels=["model"])
        for model, of_model in numbers.items():
            metric.add_metric([model], float(value(of_model)))
        yield metric


def histogram(name: str, text: str, values: Histogram) -> Metric:
    return HistogramMetricFamily(f"tarnn:{name}", text, buckets=values.buckets(), sum_value=values.sum)


async def metrics(request: Request) -> Response:
    """All tenants together, so it is for one alone where there are several."""
    if not request.scope["tarnn.operator"]:
        raise ApiError(403, "/metrics tells of all clients together: only the first key of the file may read it.")
    registry = CollectorRegistry()
    registry.register(Served(request.app.state))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE)


routes = [Route("/metrics", metrics)]

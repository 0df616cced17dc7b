"""For operators: /health, /ready, /version, and /metrics for Prometheus, with the stems that vLLM and SGLang use."""

from bisect import bisect_left
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
from starlette.responses import JSONResponse, Response

from tarnn._version import __version__
from tarnn.serving.engine import Stats
from tarnn.serving.http.errors import ApiError, unavailable
from tarnn.serving.http.openapi import TEXT, Operation
from tarnn.serving.http.response_schemas import HealthStatus, TarnnVersion
from tarnn.serving.state_info import StoreStats

TROUBLE = "states can't be written to the disk."  # the reason is for the log: anybody may ask here
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
BETWEEN_TOKENS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
# type, name, description, and the value by the engine's numbers; counters get the suffix _total
OF_ENGINES: tuple[tuple[type, str, str, Callable[[Stats], float]], ...] = (
    (Gauge, "num_requests_running", "Texts that are written now.", lambda x: x.running),
    (Gauge, "num_requests_ready", "Texts that wait for a row.", lambda x: x.ready),
    (Gauge, "num_requests_paused", "Texts whose reader is slow.", lambda x: x.paused),
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


class Histogram:
    """Counts of values up to each of some bounds. For one thread: the loop's. It costs less than the tokens it counts."""

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds, self.sum = bounds, 0.0
        self._counts = [0] * (len(bounds) + 1)

    def add(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return pairs as Prometheus has them: a bound, and the number of values up to it."""
        total, pairs = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self._counts):
            total += count
            pairs.append((bound, float(total)))
        return pairs


class Latencies:
    """first_tokens: seconds from a request's arrival to its first token; gaps: between two tokens of a text."""

    def __init__(self) -> None:
        self.first_tokens, self.gaps = Histogram(FIRST_TOKEN), Histogram(BETWEEN_TOKENS)


class ServerCollector(Collector):
    """Numbers of all engines and their stores, read at each scrape."""

    def __init__(self, state: Any):
        self.state = state

    def collect(self) -> Iterator[Metric]:
        engines: dict[str, Any] = self.state.engines
        numbers = {name: engine.stats for name, engine in engines.items()}
        yield from families(OF_ENGINES, numbers)
        stores = {name: engine.store.stats for name, engine in engines.items() if engine.store is not None}
        yield from families(OF_STORES, stores)
        latencies = self.state.latencies
        yield histogram("time_to_first_token_seconds", "From a request to its first token.", latencies.first_tokens)
        yield histogram("inter_token_latency_seconds", "Between two tokens of a text.", latencies.gaps)


def families(table: Any, numbers: Mapping[str, Any]) -> Iterator[Metric]:
    for kind, name, text, value in table:
        metric = kind(f"tarnn:{name}", text, labels=["model"])
        for model, of_model in numbers.items():
            metric.add_metric([model], float(value(of_model)))
        yield metric


def histogram(name: str, text: str, values: Histogram) -> Metric:
    return HistogramMetricFamily(f"tarnn:{name}", text, buckets=values.buckets(), sum_value=values.sum)


async def metrics(request: Request) -> Response:
    """Return numbers for Prometheus. They are those of all tenants, so only the operator's key may read them."""
    if not request.scope["tarnn.operator"]:
        raise ApiError(403, "/metrics shows all clients together: only the first key of the file may read it.")
    registry = CollectorRegistry()
    registry.register(ServerCollector(request.app.state))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE)


async def health(_: Request) -> Response:
    """Return whether the server lives."""
    return JSONResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    """Return whether the server takes requests."""
    state = request.app.state
    if state.draining:
        raise unavailable()
    if not all(engine.ready for engine in state.engines.values()):
        raise ApiError(503, "An engine has ended; the log says why. Start the server again.", code="not_ready")
    stores = {name: engine.store for name, engine in state.engines.items() if engine.store is not None}
    trouble = [f"{name}: {TROUBLE}" for name, store in stores.items() if store.stats.trouble]
    return JSONResponse({"status": "ready"} | ({"trouble": " ".join(trouble)} if trouble else {}))


async def version(_: Request) -> Response:
    """Return the version of tarnn."""
    return JSONResponse({"version": __version__})


routes = [
    Operation("GET", "/health", health, HealthStatus),
    Operation("GET", "/ready", ready, HealthStatus),
    Operation("GET", "/version", version, TarnnVersion),
    Operation("GET", "/metrics", metrics, other_answers=(TEXT,)),
]

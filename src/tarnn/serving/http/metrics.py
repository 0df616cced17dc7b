"""GET /metrics: what Prometheus reads, with the stems that vLLM and SGLang use."""

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tarnn.serving.http.errors import ApiError
from tarnn.serving.http.times import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
GAUGES = {  # field of an engine's stats → name and what it is
    "running": ("tarnn:num_requests_running", "Texts that are written now."),
    "ready": ("tarnn:num_requests_ready", "Texts that wait for a row."),
    "parked": ("tarnn:num_requests_parked", "Texts whose reader is slow."),
    "waiting": ("tarnn:num_requests_waiting", "Requests whose prompts are not read yet."),
    "waiting_tokens": ("tarnn:num_tokens_waiting", "Tokens of these."),
}
COUNTERS = {
    "tokens_read": ("tarnn:prompt_tokens", "Tokens of prompts that were read."),
    "tokens_cached": ("tarnn:prefix_cache_hits", "Tokens of prompts whose state was kept."),
    "tokens_written": ("tarnn:generation_tokens", "Tokens written."),
    "requests": ("tarnn:num_requests", "Requests that were taken."),
    "refused": ("tarnn:num_refused_requests", "Requests refused since the queue was full."),
    "errors": ("tarnn:num_failed_requests", "Requests in which the model failed."),
}


class Served(Collector):
    """Numbers of all engines and their stores, read when they are asked for."""

    def __init__(self, state: Any):
        self.state = state

    def collect(self) -> Iterator[Any]:
        engines = self.state.engines
        for field, (name, text) in GAUGES.items():
            yield family(GaugeMetricFamily(name, text, labels=["model"]), engines, field)
        for field, (name, text) in COUNTERS.items():
            yield family(CounterMetricFamily(name, text, labels=["model"]), engines, field)
        times = self.state.times
        yield histogram("tarnn:time_to_first_token_seconds", "From a request's arrival.", times.first_tokens)
        yield histogram("tarnn:inter_token_latency_seconds", "Between two tokens of a text.", times.gaps)


def family(metric: Any, engines: Any, field: str) -> Any:
    for name, engine in engines.items():
        metric.add_metric([name], getattr(engine.stats, field))
    return metric


def histogram(name: str, text: str, values: Histogram) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, text, buckets=values.buckets(), sum_value=values.sum)


async def metrics(request: Request) -> Response:
    """All tenants together, so it is for one alone where there are several."""
    if not request.scope["tarnn.operator"]:
        raise ApiError(403, "/metrics tells of all clients together: only the first key of the file may read it.")
    registry = CollectorRegistry()
    registry.register(Served(request.app.state))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE)


routes = [Route("/metrics", metrics)]

"""Requests that schemathesis makes up from our own OpenAPI document, and what must be true of the answers."""

import hypothesis
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis.specs.openapi import checks

CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
    checks.allow_header_conformance,
]
COUNTS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
MOST = 8  # tokens of an answer: a text may be as long as is asked for


def operations(url):
    """Those of the server at this address, by their labels."""
    found = schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations()
    return {operation.ok().label: operation.ok() for operation in found}


def ask(operation, mode, count, seed=0):
    """Ask for an operation `count` times at most; AssertionError for an answer that is not as it should be."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def answered(case):
        shorten(case.body)
        case.call_and_validate(checks=CHECKS, timeout=60)

    answered()


def shorten(body):
    if isinstance(body, dict):
        for name in COUNTS:
            if type(body.get(name)) is int:
                body[name] = min(body[name], MOST)

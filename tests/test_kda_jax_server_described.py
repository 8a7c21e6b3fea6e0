"""Requests made from the server's own description, right and wrong ones: none is an error of the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from kda_jax.server import Limits, application
from server_engine import EchoEngine
from server_site import Site, running

EXAMPLES = 15


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with running(EchoEngine(), limits=Limits(new_tokens=4), context=60) as site:
        yield site


@pytest.fixture(scope="module")
def described(site: Site) -> Any:
    """The description, whose requests go to the server."""
    return schemathesis.openapi.from_url(f"{site.url}/openapi.json")


POSTED = ["/v1/completions", "/v1/chat/completions", "/explain"]
GOT = ["/v1/models/{name}", "/explain", "/live", "/metrics", "/health", "/v1/models"]


RIGHT, WRONG = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
CASES = [("POST", path, mode) for path in POSTED for mode in (RIGHT, WRONG)]
CASES += [("GET", "/explain", RIGHT), ("GET", "/explain", WRONG), ("GET", "/v1/models/{name}", RIGHT)]


@pytest.mark.parametrize(
    ("method", "path", "mode"), CASES, ids=[f"{method}-{path}-{mode.value}" for method, path, mode in CASES]
)
def test_no_request_is_an_error_of_the_server(
    site: Site, described: Any, method: str, path: str, mode: GenerationMode
) -> None:
    seen = set()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    @seed(0)
    @given(case=described[path][method].as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        response = case.call()
        seen.add(response.status_code)
        case.validate_response(
            response, checks=[not_a_server_error, status_code_conformance, response_schema_conformance]
        )

    ask()
    assert seen & {200, 404} if mode is GenerationMode.POSITIVE else seen & {400, 404, 405}, seen


def test_the_description_names_every_path(site: Site, described: Any) -> None:
    routes = {route.path.replace("{name:path}", "{name}") for route in application(site.serving).routes}  # pyright: ignore
    assert routes - {"/", "/openapi.json"} == set(POSTED + GOT) == set(described)

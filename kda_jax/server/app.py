"""The application: which path goes where, and errors as json."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kda_jax.server import endpoints, watching
from kda_jax.server.delivery import Placed
from kda_jax.server.errors import ApiError
from kda_jax.server.openapi import description
from kda_jax.server.serving import Serving


def application(serving: Serving) -> Starlette:
    """The ASGI application of a server."""
    text = description(serving.name, keys=not serving.keys.open)

    async def openapi(request: Request) -> Response:
        return JSONResponse(text)

    app = Starlette(
        routes=[
            Route("/", watching.page),
            Route("/live", watching.live),
            Route("/explain", Placed(watching.explain), methods=["GET", "POST"]),
            Route("/metrics", watching.metrics),
            Route("/health", endpoints.health),
            Route("/openapi.json", openapi),
            Route("/v1/models", endpoints.models),
            Route("/v1/models/{name:path}", endpoints.model),
            Route("/v1/completions", Placed(endpoints.completions), methods=["POST"]),
            Route("/v1/chat/completions", Placed(endpoints.chat), methods=["POST"]),
        ],
        exception_handlers={
            ApiError: _told,
            HTTPException: _not_routed,
            ClientDisconnect: _gone,
            Exception: _broken,
        },
    )
    app.router.redirect_slashes = False
    app.state.serving = serving
    return app


async def _told(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _not_routed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    what = f"no {path} here" if error.status_code == 404 else f"{path}: {error.detail}"
    response = ApiError(error.status_code, f"{what}; /openapi.json says what there is").response()
    response.headers.update(error.headers or {})
    return response


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # nobody reads it


async def _broken(request: Request, error: Exception) -> Response:
    # whoever serves the application logs it
    return ApiError(500, f"an error of the server: {type(error).__name__}", code="internal").response()

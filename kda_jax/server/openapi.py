"""The OpenAPI description: requests from the types that check them, responses in outline."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from kda_jax.server.requests import ChatRequest, CompletionRequest, ExplainRequest

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_USAGE = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"],
    "properties": {
        **{name: {"type": "integer"} for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
        "prompt_tokens_details": {
            "type": "object",
            "required": ["cached_tokens", "cached_tokens_by_tier"],
            "properties": {
                "cached_tokens": {"type": "integer"},
                "cached_tokens_by_tier": {"type": "object", "additionalProperties": {"type": "integer"}},
            },
        },
    },
}
_ANSWER = {
    "type": "object",
    "required": ["id", "object", "created", "model", "choices", "usage"],
    "properties": {
        **{name: {"type": "string"} for name in ("id", "object", "model", "system_fingerprint")},
        "created": {"type": "integer"},
        "choices": {"type": "array", "items": {"type": "object"}},
        "usage": _USAGE,
    },
}
_REASONS = {
    400: "A field that is wrong, missing, or not supported.",
    401: "No key that the server takes.",
    403: "The key of an operator is needed.",
    404: "No such model.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    415: "The body is encoded.",
    429: "Too much waits already; Retry-After says when to come again.",
    500: "The engine failed.",
    503: "The server is shutting down.",
    504: "Not finished in time.",
}
_POSTED = (400, 401, 404, 408, 413, 415, 429, 500, 503, 504)


def description(name: str, keys: bool) -> dict[str, Any]:
    """The description of a server of the model `name`; `keys` says whether it asks for one."""
    _, schemas = models_json_schema(
        [(kind, "validation") for kind in (CompletionRequest, ChatRequest, ExplainRequest)],
        ref_template="#/components/schemas/{model}",
    )
    for kind in (CompletionRequest, ChatRequest):
        schemas["$defs"][kind.__name__]["properties"]["model"]["enum"] = [name]
    prompt = {"name": "prompt", "in": "query", "required": True, "schema": {"type": "string", "minLength": 1}}
    model = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    explained = _json({"type": "object", "required": ["words", "tokens", "boundary"]})
    paths = {
        "/v1/completions": {"post": _post("CompletionRequest", "Continue a text or tokens.")},
        "/v1/chat/completions": {"post": _post("ChatRequest", "Continue a conversation.")},
        "/v1/models": {"get": _get("The model.", _json({"type": "object"}), 401)},
        "/v1/models/{name}": {
            "get": {**_get("The model.", _json({"type": "object"}), 401, 404), "parameters": [model]}
        },
        "/explain": {
            "get": {
                **_get("Where a text would resume, and what limits it.", explained, 400, 401, 403, 429),
                "parameters": [prompt],
            },
            "post": {
                **_get(
                    "The same of the body of a completion or a chat.", explained, 400, 401, 403, 408, 413, 429
                ),
                "requestBody": _body("ExplainRequest"),
            },
        },
        "/live": {"get": _get("What the page shows.", _json({"type": "object"}), 401)},
        "/metrics": {"get": _get("Figures for Prometheus.", {"text/plain": {}}, 401, 403)},
        "/health": {"get": _get("Whether requests are taken.", _json({"type": "object"}), 503)},
    }
    security = {"security": [{"key": []}]} if keys else {}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kda-jax",
            "version": "1",
            "description": "OpenAI's API, and a cache that explains itself.",
        },
        "paths": paths,
        "components": {
            "schemas": {**schemas["$defs"], "Error": _ERROR, "Answer": _ANSWER},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        **security,
    }


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _body(name: str) -> dict[str, Any]:
    return {"required": True, "content": _json(_ref(name))}


def _get(summary: str, content: dict[str, Any], *errors: int) -> dict[str, Any]:
    wrong = {
        str(status): {"description": _REASONS[status], "content": _json(_ref("Error"))} for status in errors
    }
    return {"summary": summary, "responses": {"200": {"description": "Well.", "content": content}, **wrong}}


def _post(body: str, summary: str) -> dict[str, Any]:
    content = {**_json(_ref("Answer")), "text/event-stream": {"schema": {"type": "string"}}}
    return {**_get(summary, content, *_POSTED), "requestBody": _body(body)}

"""What the bodies of requests may hold: types that check, and that the OpenAPI description is made from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

MOST_STOPS = 16
MOST_TOP = 20
INT32 = 2**31 - 1
_SPENT = ("prompt", "messages", "user", "metadata", "safety_identifier", "prompt_cache_key")
_TEXT: dict[str, Any] = {"type": "string"}
_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


def _prompts(value: Any) -> list[str | list[int]]:
    """One prompt or several, each a text or token ids, as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_ids(value):
            return [value]
        if all(isinstance(item, str) or (_is_ids(item) and item) for item in value):
            return value
    raise ValueError("must be a text, a list of token ids, or a list of texts or of lists of token ids")


def _is_ids(value: Any) -> bool:
    # By the set of types: a look at each token is dear for long prompts.
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _stops(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError("must be a text, or a list of texts, none of them empty")
    if len(texts) > MOST_STOPS:
        raise ValueError(f"must be at most {MOST_STOPS} texts")
    return texts


def _content(value: Any) -> str | None:
    """A message's text; of parts, their texts one behind the other."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a text, or a list of parts of type text")
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                'must be a text, or a list of {"type": "text", "text": "..."}: there is no other'
            )
    return "".join(part["text"] for part in value)


def _neutral(value: Any) -> Any:
    if value:
        raise ValueError("is not supported; leave it out")
    return value


def _as_text(value: Any) -> Any:
    if value and value != {"type": "text"}:
        raise ValueError('is not supported unless it is {"type": "text"}; leave it out')
    return value


Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_prompts),
    WithJsonSchema(
        {"anyOf": [_TEXT, _IDS, {"type": "array", "items": {"anyOf": [_TEXT, _IDS]}, "minItems": 1}]}
    ),
]
Stops = Annotated[
    list[str],
    PlainValidator(_stops),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": MOST_STOPS},
                {"type": "null"},
            ]
        }
    ),
]
_PART: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _TEXT},
    "required": ["type", "text"],
}
Content = Annotated[
    str | None,
    PlainValidator(_content),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _PART}, {"type": "null"}]}),
]
Zero = Annotated[float, Field(ge=0, le=0)] | None
Nothing = Annotated[Any, AfterValidator(_neutral), WithJsonSchema({"type": "null"})]

AsText = Annotated[
    Any,
    AfterValidator(_as_text),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"type": {"const": "text"}},
                    "required": ["type"],
                    "additionalProperties": False,
                },
                {"type": "null"},
            ]
        }
    ),
]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Asked(_Strict):
    """What completions and chats have in common. `null` is as good as nothing."""

    model: str
    max_tokens: Annotated[int, Field(ge=1, le=INT32)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1, le=INT32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stops = Field(default_factory=list)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # taken and not used: they say something about the request, not about the answer
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # known and not supported, unless they ask for nothing
    frequency_penalty: Zero = None
    presence_penalty: Zero = None
    logit_bias: Nothing = None

    @property
    def top_logprobs_asked(self) -> int | None:
        """Likeliest tokens to tell beside each; 0 for the chosen one alone, None for none at all."""
        raise NotImplementedError

    @property
    def most_new_tokens(self) -> int | None:
        """Most tokens to generate, if it says."""
        return self.max_tokens

    def without_prompt(self) -> Asked:
        """What is left to know when the prompt has become tokens, so that the text need not be kept beside them."""
        spent = {name: None for name in _SPENT if name in type(self).model_fields}
        return self.model_copy(update=spent)


class CompletionRequest(Asked):
    """The body of /v1/completions."""

    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    echo: Literal[False] | None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    suffix: Nothing = None

    @property
    def top_logprobs_asked(self) -> int | None:
        return self.logprobs


class Message(_Strict):
    """One message. What else it holds is the template's to read."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None


class ChatRequest(Asked):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    tools: Nothing = None
    tool_choice: Literal["none"] | None = None
    response_format: AsText = None

    @property
    def top_logprobs_asked(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class ExplainRequest(_Strict):
    """The body of /explain: a prompt or messages, as completions and chats take them; other fields are ignored."""

    model_config = ConfigDict(extra="ignore")
    prompt: Prompts | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tenant: str | None = None

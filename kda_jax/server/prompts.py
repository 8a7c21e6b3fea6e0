"""What requests ask to continue, as token ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kda_jax.server.errors import ApiError
from kda_jax.server.requests import Message
from kda_jax.server.serving import Serving


def of_prompts(serving: Serving, prompts: Sequence[str | list[int]]) -> list[np.ndarray]:
    """Token ids of prompts, int32 [T] each; a text begins with the token that opens a text, where the model has one.

    Raises:
        ApiError: 400 for an empty prompt, ids that are no tokens, and a prompt that leaves no room.
    """
    found = []
    for number, prompt in enumerate(prompts):
        param = "prompt" if len(prompts) == 1 else f"prompt[{number}]"
        if isinstance(prompt, str):
            opening = serving.tokenizer.bos_token_id
            ids = ([] if opening is None else [opening]) + serving.tokenizer.encode(prompt)
        else:
            ids = prompt
        wrong = next((i for i in ids if not 0 <= i < serving.vocab_size), None)
        if wrong is not None:
            raise ApiError(
                400, f"{param}: {wrong} is no token, they are 0..{serving.vocab_size - 1}", param=param
            )
        found.append(_within(serving, ids, param))
    return found


def of_messages(serving: Serving, messages: Sequence[Message]) -> np.ndarray:
    """Token ids of a conversation, int32 [T], as the model's template writes it.

    Raises:
        ApiError: 400 if the template refuses it, or the model has none, or the prompt leaves no room.
    """
    given = [message.model_dump(exclude_unset=True) for message in messages]
    try:
        ids = serving.tokenizer.apply_chat_template(given)
    except ValueError as error:
        raise ApiError(400, f"messages: {error}", param="messages") from None
    return _within(serving, ids, "messages")


def room(serving: Serving, prompt_tokens: int, asked: int | None, default: int, param: str) -> int:
    """Most tokens to generate behind a prompt.

    Raises:
        ApiError: 400 if more are asked for than fit.
    """
    left = serving.context - prompt_tokens
    if asked is not None and asked > left:
        message = f"{param}={asked}: behind a prompt of {prompt_tokens} tokens there is room for {left}"
        raise ApiError(400, message, param=param, code="context_length_exceeded")
    return min(default, left) if asked is None else asked


def _within(serving: Serving, ids: list[int], param: str) -> np.ndarray:
    if not ids:
        raise ApiError(400, f"{param} is empty; give at least one token to go on from", param=param)
    if len(ids) >= serving.context:
        message = (
            f"{param} has {len(ids)} tokens, and with one to generate they must be at most {serving.context}"
        )
        raise ApiError(400, message, param=param, code="context_length_exceeded")
    return np.array(ids, np.int32)

"""Chat templates: jinja in a sandbox, fed with text in which nothing is special."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

MEDIA_PLACEHOLDER = "<|media_pad|>"
"""Kimi's special token for a piece of an image or a video."""

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"  # Unicode promises that these are no characters


class Escapes:
    """Takes spellings of special tokens out of what a user wrote; puts them back when the template has run.

    Between the two calls each spelling is a number between two code points that stand for nothing: the
    special tokens found in the rendered text are those that the template wrote.
    """

    def __init__(self, special: re.Pattern[str]) -> None:
        """Makes an empty table; `special` matches every special token."""
        self._pattern = re.compile(f"{special.pattern}|{_OPEN}")
        self._hidden: list[str] = []

    def hide(self, value: Any) -> Any:
        """A copy of a structure of mappings, lists and values, with the spellings in its texts replaced."""
        if isinstance(value, str):
            return self._pattern.sub(self._replace, value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item) for item in value]
        return value

    def show(self, text: str) -> str:
        """The text with the spellings back in their places."""
        return re.sub(f"{_OPEN}(\\d+){_CLOSE}", lambda match: self._hidden[int(match[1])], text)

    def _replace(self, match: re.Match[str]) -> str:
        self._hidden.append(match[0])
        return f"{_OPEN}{len(self._hidden) - 1}{_CLOSE}"


def refuse_media(messages: Sequence[Mapping[str, Any]]) -> None:
    """Looks for images and videos among the parts of messages, as chat interfaces write them ("type": "image_url").

    Raises:
        ValueError: if there is one.
    """
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list | tuple) else ():
            kind = str(part.get("type")) if isinstance(part, Mapping) else ""
            if kind.removeprefix("input_").startswith(("image", "video")):
                raise ValueError(
                    f"a message holds a part of type {kind!r}; only text can be read: leave images out"
                )


def render(template: str, **variables: Any) -> str:
    """Runs a chat template as transformers does (`tojson`, `raise_exception`, `strftime_now`, loop controls).

    Args:
        template: jinja source. It may come from anywhere: it runs in a sandbox that can change nothing.
        variables: what the template can name.

    Raises:
        ValueError: if the source is no template, or refuses the conversation.
    """
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(template).render(**variables)
    except (jinja2.TemplateError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise ValueError(f"the chat template cannot write this conversation: {error}") from None


def _refuse(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)

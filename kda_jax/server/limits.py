"""What one server takes."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a server takes, checked.

    Attributes:
        body_nbytes: most bytes of a request's body; more is 413.
        body_s: most seconds that a body may take to arrive; more is 408. A request's head has as many.
        bodies_nbytes: most bytes of bodies that are being read, of all requests together; more is 429.
        unread_s: seconds after which a client is hung up on that takes nothing of what it is sent.
        choices: most continuations that one request asks for, all prompts together.
        requests: most requests at once, from their arrival until their answer has been taken; more is 429.
        new_tokens: tokens that a chat generates if it does not say.
        request_s: seconds after which a request is given up with 504; None for never.
        retry_s: what 429 and 503 name in `Retry-After`.
        drain_s: seconds that requests have to finish once the server is told to stop.

    Raises:
        ValueError: for values that are not positive, and bodies together that are less than one.
    """

    body_nbytes: int = 8 << 20
    body_s: float = 30.0
    bodies_nbytes: int = 64 << 20
    unread_s: float = 30.0
    choices: int = 16
    requests: int = 1024
    new_tokens: int = 1024
    request_s: float | None = None
    retry_s: int = 1
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise ValueError(f"{field.name}={value} must be above 0")
        if self.bodies_nbytes < self.body_nbytes:
            raise ValueError(
                f"bodies_nbytes={self.bodies_nbytes} must be at least body_nbytes={self.body_nbytes}, one body"
            )

"""What two requests must have in common before their tokens may be compared at all."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields

DIGEST_NBYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Everything besides tokens that a state depends on, and who may see it.

    Attributes:
        weights: digest of the weights' contents; a path or a name is none, since both can be written again.
        tokenizer: digest of the tokenizer and of the chat template.
        quantisation: of the weights at run time, as `none` or `int8`.
        state_dtype: dtype a checkpoint's recurrent state is kept in; `int8` if any tier compresses it (`Compression`),
            since what resumes from it has other bits.
        layout: version of the names, shapes and meaning of a checkpoint's leaves.
        adapter: digest of an adapter's contents; empty without one.
        topology: how leaves are cut over devices, as `tp=8`; empty for one device.
        salt: secret of a tenant. Tenants with different salts share nothing; empty shares with all who have none.
    """

    weights: bytes
    tokenizer: bytes
    quantisation: str = "none"
    state_dtype: str = "float32"
    layout: int = 1
    adapter: bytes = b""
    topology: str = ""
    salt: bytes = b""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, expected = getattr(self, field.name), field.type
            if type(value).__name__ != expected:
                raise ValueError(
                    f"{field.name} is {type(value).__name__}, expected {expected}: its type is part of the name"
                )

    def digest(self) -> bytes:
        """32 bytes that differ when any field differs: each goes in with its name, its type and its length."""
        hashed = hashlib.blake2b(digest_size=DIGEST_NBYTES, person=b"kda namespace")
        for field in fields(self):
            value = getattr(self, field.name)
            data = value if isinstance(value, bytes) else str(value).encode()
            for part in (field.name.encode(), type(value).__name__.encode(), data):
                hashed.update(len(part).to_bytes(8, "little"))
                hashed.update(part)
        return hashed.digest()

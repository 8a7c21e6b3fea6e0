"""Which model a folder holds, told by its contents."""

from __future__ import annotations

import hashlib
from pathlib import Path

WEIGHTS = ("config.json", "*.safetensors")
TOKENIZER = ("tokenizer*.json", "tiktoken.model", "*.jinja")


def folder_digest(folder: str | Path, patterns: tuple[str, ...]) -> bytes:
    """A digest of the contents of a folder's files, and of their names; it reads all of them.

    Args:
        folder: a checkpoint in Hugging Face's layout.
        patterns: which files: `WEIGHTS` or `TOKENIZER`.

    Returns:
        32 bytes of BLAKE2b. Folders without such a file have one digest.

    Raises:
        OSError: if a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=32)
    for path in sorted({path for pattern in patterns for path in Path(folder).glob(pattern)}):
        with path.open("rb") as file:
            contents = hashlib.file_digest(file, hashlib.blake2b).digest()
        digest.update(len(path.name).to_bytes(8, "little") + path.name.encode() + contents)
    return digest.digest()

"""API keys, and the tenant that each belongs to."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

LEAST_CHARS = 16


class Tenant(NamedTuple):
    """Who asks.

    Attributes:
        name: as the keys file has it, "" where there are no keys.
        salt: secret that goes into the names of all that it caches: tenants with different salts share nothing.
        operator: whether it may see everybody's requests, checkpoints and figures.
    """

    name: str
    salt: str
    operator: bool


EVERYBODY = Tenant("", "", True)


class Keys:
    """The keys that a server takes; none for a server that is open to all who reach it."""

    def __init__(self, tenants: Mapping[str, Tenant] | None = None) -> None:
        """`tenants` by key."""
        self._tenants = {_digest(key): tenant for key, tenant in (tenants or {}).items()}

    @property
    def open(self) -> bool:
        """Whether there are no keys."""
        return not self._tenants

    def named(self, name: str) -> Tenant | None:
        """The tenant of a name."""
        return next((tenant for tenant in self._tenants.values() if tenant.name == name), None)

    def tenant(self, authorization: str) -> Tenant | None:
        """Whose key a header `Authorization: Bearer KEY` holds; None if it holds none of ours.

        Keys are looked up by their digests, so that the time it takes tells nothing about them.
        """
        if self.open:
            return EVERYBODY
        scheme, _, key = authorization.partition(" ")
        return self._tenants.get(_digest(key.strip())) if scheme.lower() == "bearer" else None


def read_keys(file: Path) -> Keys:
    """Reads a keys file: a table a tenant in TOML, with `key`, `salt`, and `operator = true` for who runs the server.

    Raises:
        ValueError: a file without a tenant, a field that is missing, too short or unknown, or one key given twice.
        OSError: if it cannot be read.
    """
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no TOML: {error}") from None
    tenants: dict[str, Tenant] = {}
    for name, table in tables.items():
        key, tenant = _tenant(f"{file}: [{name}]", name, table)
        if key in tenants:
            raise ValueError(f"{file}: [{name}] has the key of [{tenants[key].name}]; give each its own")
        tenants[key] = tenant
    if not tenants:
        raise ValueError(f'{file} names no tenant; write a table for each: [name], key = "...", salt = "..."')
    return Keys(tenants)


def _tenant(where: str, name: str, table: Any) -> tuple[str, Tenant]:
    if not isinstance(table, dict):
        raise ValueError(f"{where} must be a table with key and salt")
    if unknown := sorted(table.keys() - {"key", "salt", "operator"}):
        raise ValueError(f"{where} has {unknown[0]!r}; it takes key, salt and operator")
    for field in ("key", "salt"):
        value = table.get(field)
        if not isinstance(value, str) or len(value) < LEAST_CHARS or not value.isascii() or " " in value:
            raise ValueError(f"{where} needs a {field} of at least {LEAST_CHARS} ASCII characters, no blanks")
    operator = table.get("operator", False)
    if not isinstance(operator, bool):
        raise ValueError(f"{where}: operator is true or false")
    return table["key"], Tenant(name, table["salt"], operator)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()

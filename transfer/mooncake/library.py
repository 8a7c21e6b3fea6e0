"""Mooncake's library: found, set up once a process, or said what is missing and what to do."""

from __future__ import annotations

import importlib.util
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from transfer.errors import Unavailable
from transfer.mooncake.settings import MIB, MooncakeSettings

INSTALL = "pip install 'mooncake-transfer-engine-non-cuda>=0.3.13.post1'"
PROBE_S = 2.0
LOCAL_BUFFER = 16 * MIB  # only calls that need none are used


class Store(Protocol):
    """What is used of `mooncake.store.MooncakeDistributedStore`. Codes are in `transfer.mooncake.codes`."""

    def register_buffer(self, buffer_ptr: int, size: int) -> int: ...
    def unregister_buffer(self, buffer_ptr: int) -> int: ...
    def batch_is_exist(self, keys: list[str]) -> list[int]: ...
    def get_size(self, key: str, /) -> int: ...
    def batch_put_session_start(self, keys: list[str], sizes: list[int], config: Any) -> list[int]: ...
    def batch_put_from_multi_buffer_ranges(
        self,
        keys: list[str],
        all_buffer_ptrs: list[list[int]],
        all_sizes: list[list[int]],
        all_dst_offsets: list[list[int]],
    ) -> list[int]: ...
    def batch_put_session_end(self, keys: list[str]) -> list[int]: ...
    def batch_put_session_revoke(self, keys: list[str]) -> list[int]: ...
    def get_into_ranges(
        self,
        buffer_ptrs: list[int],
        all_keys: list[list[str]],
        all_dst_offsets: list[list[list[int]]],
        all_src_offsets: list[list[list[int]]],
        all_sizes: list[list[list[int]]],
    ) -> list[list[list[int]]]: ...
    def batch_remove(self, keys: list[str], force: bool = False) -> list[int]: ...
    def close(self) -> int: ...


class Library(NamedTuple):
    """A store that is set up.

    Attributes:
        store: of `mooncake.store.MooncakeDistributedStore`, or what does as it does.
        config: makes a `mooncake.store.ReplicateConfig`.
    """

    store: Store
    config: Callable[[], Any]

    def grouped(self, groups: Sequence[str]) -> Any:
        """A config that puts each object into its group, where this version of the library has groups."""
        config = self.config()
        if hasattr(config, "group_ids"):
            config.group_ids = list(groups)
        return config


_lock = threading.Lock()
_opened: MooncakeSettings | None = None


def connect(settings: MooncakeSettings) -> Library:
    """Opens the one store of this process.

    Raises:
        Unavailable: the library is missing or broken, the process has a store already, the master does not answer,
            or Mooncake refused the settings. Says which, and what to do.
    """
    global _opened
    with _lock:
        if _opened is not None:
            raise Unavailable(
                f"this process has a Mooncake store already, with {_opened};"
                " share that MooncakeObjects, or close it first"
            )
        module = load(settings)
        _reach(settings)
        store = module.MooncakeDistributedStore()
        if not hasattr(store, "batch_put_session_start"):
            raise Unavailable(f"this version of Mooncake's library is too old; {INSTALL}")
        code = store.setup(
            settings.hostname,
            "P2PHANDSHAKE",
            settings.segment_bytes,
            LOCAL_BUFFER,
            settings.protocol,
            ",".join(settings.devices),
            settings.master,
        )
        if code:
            raise Unavailable(
                f"Mooncake's setup gave {code}: what listens at {settings.master} is no master or does not answer,"
                f" or this machine cannot do what {settings} asks; MC_LOG_LEVEL=INFO in the environment says more"
            )
        _opened = settings
    return Library(store, module.ReplicateConfig)


def disconnect(library: Library) -> None:
    """Closes the store; no call on it may run or follow. The process may open another one then."""
    global _opened
    library.store.close()
    with _lock:
        _opened = None


def _reach(settings: MooncakeSettings) -> None:
    """The library itself would try for up to 90 s."""
    try:
        socket.create_connection(settings.address, PROBE_S).close()
    except OSError as error:
        raise Unavailable(
            f"no Mooncake master answers at {settings.master} ({error}); start one with"
            f" `mooncake_master --rpc_address=ADDRESS --rpc_port={settings.address[1]}`, or `python -m transfer up`,"
            " or say where it is (MooncakeSettings.master)"
        ) from error


def load(settings: MooncakeSettings) -> Any:
    """The module `mooncake.store`, which reads the environment when it is imported; what is set there already stays.

    Raises:
        Unavailable: it cannot be imported; says what to install.
    """
    _set_environment(settings.hostname, settings.protocol)
    try:
        import mooncake.store as module
    except ImportError as error:
        raise Unavailable(remedy(error)) from error
    return module


def load_engine(hostname: str, protocol: str) -> Any:
    """The module `mooncake.engine`; as `load`."""
    _set_environment(hostname, protocol)
    try:
        import mooncake.engine as module  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise Unavailable(remedy(error)) from error
    return module


def _set_environment(hostname: str, protocol: str) -> None:
    environment = {  # less talk, and less patience with what does not answer
        "MC_LOG_LEVEL": "ERROR",
        "MC_YLT_LOG_LEVEL": "error",
        "MC_STORE_CLIENT_METRIC": "0",
        "MC_TE_METRIC": "0",
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        "MC_RPC_TIMEOUT_MS": "5000",
    }
    if protocol == "tcp":
        environment |= {"MC_FORCE_TCP": "1", "MC_TCP_BIND_ADDRESS": hostname}
        environment |= {"MC_TCP_STATUS_TIMEOUT_SEC": "5"}
    for name, value in environment.items():
        os.environ.setdefault(name, value)


def remedy(error: ImportError) -> str:
    """What to install after `import mooncake.store` failed."""
    if importlib.util.find_spec("mooncake") is None:
        return f"Mooncake's library is not installed; {INSTALL}"
    if "libibverbs" in str(error):
        return f"Mooncake needs libibverbs, for TCP too ({error}); apt-get install libibverbs1"
    if "libcuda" in str(error):
        return (
            f"this build of Mooncake needs a GPU's driver ({error});"
            f" pip uninstall mooncake-transfer-engine, then {INSTALL}"
        )
    return f"Mooncake's library does not load ({error}); {INSTALL} --force-reinstall"

"""`serve`: a model behind OpenAI's API."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kda_jax.commands.convert import Dtype
from kda_jax.commands.errors import CommandError
from kda_jax.commands.stores import SPEC, open_store

if TYPE_CHECKING:
    from kda_jax.engine import Engine
    from kda_jax.model import Model

GB = 1 << 30
MOST_TOKENS = 16_384
COMPILED = Path("~/.cache/kda_jax/compiled")
_NEEDED = ("prometheus_client", "pydantic", "starlette", "uvicorn")


def serve(
    model: Annotated[Path, typer.Argument(help="A checkpoint in Hugging Face's layout.")],
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 is every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="What requests call the model (the folder's name).")
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(help="A TOML file of API keys; without it all are let in.")
    ] = None,
    store: Annotated[
        list[str] | None, typer.Option(help=f"Where checkpoints outlive the process: {SPEC}, or one of each.")
    ] = None,
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Keep checkpoints, and resume from them.")
    ] = True,
    host_gb: Annotated[float, typer.Option(min=0.0, help="Host memory for checkpoints.")] = 0.0,
    memory_gb: Annotated[
        float, typer.Option(min=0.001, help="Device memory for latents and checkpoints.")
    ] = 1.0,
    slots: Annotated[int, typer.Option(min=1, help="Most requests that run at once.")] = 8,
    max_tokens: Annotated[
        int, typer.Option(min=2, help="Most tokens of a request, prompt and generated.")
    ] = MOST_TOKENS,
    budget: Annotated[int, typer.Option(min=64, help="Most tokens that a step computes.")] = 512,
    queued: Annotated[
        int, typer.Option(min=1, help="Most prompt tokens that wait; more get 429.")
    ] = 1_000_000,
    lookup: Annotated[int, typer.Option(min=0, help="Tokens to draft from the prompt; 0 for none.")] = 0,
    timeout: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds after which a request is given up.")
    ] = None,
    drain: Annotated[float, typer.Option(min=0.1, help="Seconds to finish requests on SIGTERM.")] = 30.0,
    body_mb: Annotated[int, typer.Option(min=1, help="Largest body of a request.")] = 8,
    bodies_mb: Annotated[int, typer.Option(min=1, help="Bodies that are read at once; more get 429.")] = 64,
    unread: Annotated[
        float, typer.Option(min=0.1, help="Seconds after which a client that takes nothing is hung up on.")
    ] = 30.0,
    chat_template: Annotated[
        Path | None, typer.Option(help="A jinja file in place of the model's own.")
    ] = None,
    compiled: Annotated[Path, typer.Option(help="Where compiled programs are kept.")] = COMPILED,
    dtype: Annotated[Dtype | None, typer.Option(help="Of the model (default: as stored).")] = None,
) -> None:
    """Serve a model: OpenAI's API, and a page that says why a prompt was no hit."""
    check_installed()
    import kda_jax
    from cache.retention import Creation
    from kda_jax.server import Keys, Limits, Serving, bind, read_keys, run

    if not model.exists():
        raise CommandError(f"no such path: {model}; give a folder with config.json and model.safetensors")
    taken = Keys() if keys is None else read_keys(keys)
    if bodies_mb < body_mb:
        raise CommandError(
            f"--bodies-mb {bodies_mb} has no room for one body of --body-mb {body_mb}: give more"
        )
    limits = Limits(
        body_nbytes=body_mb << 20,
        bodies_nbytes=bodies_mb << 20,
        unread_s=unread,
        request_s=timeout,
        drain_s=drain,
    )
    tokenizer = kda_jax.load_tokenizer(model)
    if chat_template is not None:
        tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
    sizes: dict[str, Any] = {
        "slots": slots,
        "nbytes": int(memory_gb * GB),
        "budget": budget,
        "queued": queued,
    }
    if not cache:
        if store or host_gb:
            raise CommandError("--no-cache keeps nothing: leave out --store and --host-gb")
        sizes["creation"] = Creation(kinds=frozenset())
    sizes |= {"lookup": lookup} if lookup else {}
    sizes |= {"host_nbytes": int(host_gb * GB)} if host_gb else {}
    with ExitStack() as closing:
        bound = closing.enter_context(bind(host, port))
        for spec in store or ():
            tier = "disk" if spec.startswith("disk:") else "remote"
            if tier in sizes:
                raise CommandError(f"--store {spec}: give at most one {SPEC}")
            sizes[tier] = closing.enter_context(open_store(spec))
        keep_compiled(compiled)
        loaded = kda_jax.load(model, dtype=dtype and dtype.value)
        context = min(max_tokens, loaded.config.model_max_length)
        engine, fingerprint = start(model, loaded, max_tokens=context, **sizes)
        closing.enter_context(engine)
        serving = Serving(
            engine,
            tokenizer,
            name=name or model.resolve().name,
            vocab_size=loaded.config.vocab_size,
            context=context,
            fingerprint=fingerprint,
            limits=limits,
            keys=taken,
        )
        if taken.open:
            _say(f"no --keys: whoever reaches {host} is let in, and all share one cache")
        if not run(serving, bound, lambda url: print(f"serving {serving.name} on {url}", flush=True)):
            _say("stopped before every request had finished")


def check_installed() -> None:
    """Raises:
    CommandError: where the packages that a server needs are not there.
    """
    from importlib.util import find_spec

    if missing := [package for package in _NEEDED if find_spec(package) is None]:
        raise CommandError(f"serving needs {', '.join(missing)}: pip install 'kda-jax[serve]'")


def keep_compiled(folder: Path) -> None:
    """Has JAX keep compiled programs in a folder, unless it was told of another: the next start compiles none.

    Quick ones too, which it would leave out by itself: there are few, and together they take seconds.
    """
    import jax

    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        jax.config.update("jax_compilation_cache_dir", str(folder.expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def start(folder: Path, model: Model, **options: Any) -> tuple[Engine, str]:
    """An engine of a model, in a namespace of its files, and a word that changes with these."""
    from cache import Namespace
    from kda_jax.engine import Engine
    from kda_jax.forward import dtype_of, split
    from kda_jax.weights.digest import TOKENIZER, WEIGHTS, folder_digest

    parts = split(model)
    namespace = Namespace(
        weights=folder_digest(folder, WEIGHTS),
        tokenizer=folder_digest(folder, TOKENIZER),
        quantisation=str(dtype_of(parts[1])),
    )
    engine = Engine(
        parts, namespace=namespace, stop_tokens=model.config.stop_tokens, progress=_progress, **options
    )
    return engine, f"fp_{namespace.digest().hex()[:12]}"


def _progress(program: str, done: int, count: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\rcompiling {done + 1} of {count} programs: {program:<24}")
        sys.stderr.write("\n" if done + 1 == count else "")
        sys.stderr.flush()


def _say(text: str) -> None:
    print(f"kda_jax: {text}", file=sys.stderr, flush=True)

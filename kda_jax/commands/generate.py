"""`generate`: text from a checkpoint, printed as it comes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kda_jax.commands.convert import Dtype, Unpack
from kda_jax.commands.errors import CommandError

if TYPE_CHECKING:
    from kda_jax.tokenizer import Tokenizer


def generate(
    model: Annotated[Path, typer.Argument(help="A checkpoint in Hugging Face's layout.")],
    prompt: Annotated[str | None, typer.Argument(help="The text to continue.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the text from a file.")] = None,
    token_ids: Annotated[str | None, typer.Option(help='Token ids in place of text, as "1 2 3".')] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The text is a user's turn in the chat template.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1)] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0)] = None,
    min_p: Annotated[float | None, typer.Option(min=0.0, max=1.0)] = None,
    repetition_penalty: Annotated[float, typer.Option(min=0.0)] = 1.0,
    seed: Annotated[int, typer.Option()] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given often.")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on from this state; the prompt is what follows it.")
    ] = None,
    save_state: Annotated[Path | None, typer.Option(help="Save the state at the end here.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Of the model (default: as stored).")] = None,
    unpack: Unpack = False,
) -> None:
    """Continue a text, from its beginning or from a saved state."""
    import kda_jax

    text = _text(prompt, prompt_file, token_ids)
    if not model.exists():
        raise CommandError(f"no such path: {model}; give a folder with config.json and model.safetensors")
    loaded = kda_jax.load(model, dtype=dtype and dtype.value, unpack=unpack)
    if text is None:
        tokenizer, ids = None, _ids(token_ids or "")
    else:
        tokenizer = kda_jax.load_tokenizer(model)
        ids = _encode(tokenizer, text, chat, resumed=resume is not None)
    if not ids:
        raise CommandError("the prompt is empty; give at least one token to go on from")
    pieces = kda_jax.stream(
        loaded,
        ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop or None,
        tokenizer=tokenizer,
        state=None if resume is None else kda_jax.load_state(resume, loaded),
    )
    try:
        while True:
            _write(piece if isinstance(piece := next(pieces), str) else f"{piece} ")
    except StopIteration as end:
        _write("\n")
        if save_state is not None:
            kda_jax.save_state(save_state, end.value.state, loaded)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _text(prompt: str | None, prompt_file: Path | None, token_ids: str | None) -> str | None:
    given = [source for source in (prompt, prompt_file, token_ids) if source is not None]
    if len(given) != 1:
        raise CommandError(f"give one prompt: text, --prompt-file or --token-ids; got {len(given)}")
    if token_ids is not None:
        return None
    text = prompt if prompt_file is None else prompt_file.read_text(encoding="utf-8")
    if not text:
        raise CommandError("the prompt is empty; give some text to go on from")
    return text


def _ids(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    try:
        return [int(word) for word in words]
    except ValueError:
        raise CommandError(f'--token-ids takes whole numbers, as "1 2 3"; got {text!r}') from None


def _encode(tokenizer: Tokenizer, text: str, chat: bool, resumed: bool) -> list[int]:
    if chat:
        return tokenizer.apply_chat_template([{"role": "user", "content": text}])
    ids = tokenizer.encode(text)
    return ids if resumed or tokenizer.bos_token_id is None else [tokenizer.bos_token_id, *ids]

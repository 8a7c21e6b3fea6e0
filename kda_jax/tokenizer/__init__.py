"""Text <-> token ids, and chat templates."""

from kda_jax.tokenizer.codecs import ByteCodec, Codec, JsonCodec, TiktokenCodec
from kda_jax.tokenizer.tokenizer import Tokenizer, load_tokenizer

__all__ = ["ByteCodec", "Codec", "JsonCodec", "TiktokenCodec", "Tokenizer", "load_tokenizer"]

"""The bytes that single tokens stand for; their texts show a part of a character as a replacement character."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # of sentencepiece


def token_bytes(tokenizer: Any) -> Callable[[int], bytes]:
    """A function from an id to its bytes; ids of a padded vocabulary, which the tokenizer does not have, have none."""
    decoders = set(_decoders(getattr(tokenizer, "backend_tokenizer", None)))
    whole = {number: added.content for number, added in tokenizer.added_tokens_decoder.items()}

    def found(token_id: int) -> bytes:
        if token_id in whole:
            return whole[token_id].encode()
        token = tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if "ByteLevel" in decoders and all(character in _BYTES for character in token):
            return bytes(_BYTES[character] for character in token)
        if "ByteFallback" in decoders and (byte := _BYTE.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        if "Metaspace" in decoders or "Replace" in decoders:
            return token.replace(_SPACE, " ").encode()
        return tokenizer.decode([token_id]).encode()

    return found


def _decoders(backend: Any) -> Iterator[str]:
    """The types of a tokenizer's decoder, of a sequence those of all its parts."""
    if backend is None or backend.decoder is None:
        return
    left = [json.loads(backend.decoder.__getstate__())]
    while left:
        one = left.pop()
        yield one["type"]
        left += one.get("decoders", ())


def _byte_level() -> dict[str, int]:
    """Characters of a byte-level vocabulary: printable bytes stand for themselves, the others for those from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_level()

"""Search documents: a file that stays in memory, by BM25 (https://doi.org/10.1561/1500000019, the bm25s package), or a
search service behind HTTP.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import httpx

from envs.data.sources import Source, open_source
from streamrl.config.schema import ToolUseConfig
from streamrl.errors import TaskError, in_one_line, install_extra

TEXT_KEYS = ("text", "contents", "content", "body", "document")
TITLE_KEY = "title"
NUM_FOUND = 3
SERVICE_S = 30.0
_WORD = re.compile(r"\w+")


class SearchTool:
    """The best few documents for some words; the index is made at the first call.

    Raises:
        TaskError: env.tool_use.documents is not set, or what it names cannot be read.
    """

    name = "search"
    description = "Find documents by words. The best ones come first."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "the words to look for"}},
        "required": ["query"],
    }

    def __init__(self, settings: ToolUseConfig) -> None:
        if settings.documents is None:
            raise TaskError("env.tools holds search: set env.tool_use.documents=FILE, the texts to search.")
        self._library = library_of(settings.documents, NUM_FOUND)
        if isinstance(self._library, Library):
            self._library.check()

    def call(self, arguments: Mapping[str, Any]) -> str:
        found = self._library.best(arguments["query"])
        return "\n\n".join(f"[{rank}] {text}" for rank, text in enumerate(found, 1)) or "Nothing was found."


class Library:
    """The texts of a search, indexed at the first one; threads may share it.

    Args:
        open_texts: gives them: a list, or a source of records.
        num_results: found at once.
    """

    def __init__(self, open_texts: Callable[[], Sequence[str] | Source], num_results: int) -> None:
        self._open, self._num_results = open_texts, num_results
        self._lock = threading.Lock()
        self._opened: tuple[Callable[[int], str], TextIndex] | None = None

    def check(self) -> None:
        """Raise TaskError unless the first text can be read."""
        texts = self._open()
        if not isinstance(texts, Sequence):
            document(texts, 0)

    def best(self, query: str) -> list[str]:
        """The best texts."""
        with self._lock:
            if self._opened is None:
                self._opened = self._index()
        text, index = self._opened
        return [text(place) for place in index.search(query, self._num_results)]

    def _index(self) -> tuple[Callable[[int], str], TextIndex]:
        texts = self._open()
        text = texts.__getitem__ if isinstance(texts, Sequence) else partial(document, texts)
        return text, TextIndex(text(place) for place in range(len(texts)))


class SearchService:
    """A search behind HTTP as Search-R1 has it: `POST {"queries": [...], "topk": 3}`; threads may share it."""

    def __init__(self, url: str, num_results: int) -> None:
        self._url, self._num_results = url, num_results
        self._client = httpx.Client(timeout=SERVICE_S, trust_env=False)

    def best(self, query: str) -> list[str]:
        """The best texts. Raises TaskError with what the service said."""
        try:
            asked = {"queries": [query], "topk": self._num_results, "return_scores": False}
            found = self._client.post(self._url, json=asked).raise_for_status().json()["result"][0]
            texts = [text_of(one.get("document", one)) for one in found[: self._num_results]]
        except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
            said = f"{type(error).__name__}: {in_one_line(error)}"
            raise TaskError(
                f"env.tool_use.documents={self._url} gave no documents ({said}): start the search service, such as "
                "examples/search_service.py, or name a file"
            ) from error
        return [text for text in texts if text is not None]


def library_of(documents: str, num_results: int) -> Library | SearchService:
    """Open `env.tool_use.documents`: a file, or the URL of a service."""
    if documents.startswith(("http://", "https://")):
        return SearchService(documents, num_results)
    return Library(partial(open_source, documents, setting="env.tool_use.documents"), num_results)


class TextIndex:
    """Words and the texts that hold them; the texts themselves are not kept. Raises TaskError without the package."""

    def __init__(self, texts: Iterable[str]) -> None:
        try:
            import bm25s
        except ModuleNotFoundError as error:
            raise TaskError(f"the search tool needs {error.name}; install it with {install_extra('tasks')}.") from error
        words = [_words(text) for text in texts]
        self._size = len(words)
        self._bm25 = bm25s.BM25()
        self._bm25.index(words, show_progress=False)

    def search(self, query: str, num_found: int) -> list[int]:
        """Places of the best documents that hold any of the words."""
        words = [word for word in _words(query) if word in self._bm25.vocab_dict]
        if not words:
            return []
        places, scores = self._bm25.retrieve([words], k=min(num_found, self._size), show_progress=False)
        return [int(place) for place, score in zip(places[0], scores[0], strict=True) if score > 0]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def document(source: Source, place: int) -> str:
    """A record's text, its title before it. Raises TaskError naming file and record if it has none."""
    text = text_of(source.row(place))
    if text is None:
        keys = ", ".join(TEXT_KEYS)
        raise TaskError(f"{source.where(place)}: no text in any of the fields {keys}: give every document one of them.")
    return text


def text_of(record: Mapping[str, Any]) -> str | None:
    """A document's text, its title before it; None if it has none."""
    text = next((record[key] for key in TEXT_KEYS if isinstance(record.get(key), str)), None)
    return f"{record[TITLE_KEY]}\n{text}" if text is not None and record.get(TITLE_KEY) else text

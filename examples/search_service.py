"""A search service over a file of documents: one index (BM25) for all actors, in the forms of Search-R1 and of RL2.

    python examples/search_service.py wiki.jsonl
    streamrl launch experiment=searchr1 env.tool_use.documents=http://127.0.0.1:10000/retrieve

A document is a record with `contents` or `text`, and perhaps a `title`; the file is read as data.path is.

    GET  /health                                      {"documents": 1000}
    POST /retrieve  {"queries": [...], "topk": 3}     {"result": [[{"contents": "..."}, ...], ...]}
    POST /search    {"query": "..."}                  {"passage": "Doc 1: ..."}, which RL2's envs/searchr1.py asks for
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from aiohttp import web

from envs.data.sources import open_source
from envs.json_service import listening
from envs.tools.search import Library

MAX_BYTES = 1 << 20


class SearchApp:
    """Answers the requests; searches run in threads."""

    def __init__(self, documents: str) -> None:
        self._source = open_source(documents, setting="the file of documents")
        self._library = Library(lambda: self._source, 50)

    async def answer(self, request: web.Request, body: Any) -> tuple[int, Any]:
        """Status and content."""
        match request.path, body:
            case "/health", _:
                return 200, {"documents": len(self._source)}
            case "/retrieve", {"queries": list(queries)}:
                found = [await self._found(str(query), int(body.get("topk") or 3)) for query in queries]
                return 200, {"result": [[{"contents": text} for text in texts] for texts in found]}
            case "/search", {"query": str(query)}:
                texts = await self._found(query, int(body.get("topk") or 3))
                return 200, {"passage": "\n".join(f"Doc {rank}: {text}" for rank, text in enumerate(texts, 1))}
        return 400, {"error": "POST /retrieve with queries, or /search with a query"}

    async def _found(self, query: str, num: int) -> list[str]:
        return (await asyncio.to_thread(self._library.best, query))[:num]


async def serve(documents: str, host: str, port: int) -> None:
    """Serve until the process is stopped; the first line says where."""
    async with listening(SearchApp(documents).answer, host, port, max_bytes=MAX_BYTES) as (there, taken):
        print(f"searching {documents} at http://{there}:{taken}/retrieve", flush=True)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", help="a file of documents")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=10000)
    given = parser.parse_args()
    asyncio.run(serve(given.documents, given.host, given.port))


if __name__ == "__main__":
    main()

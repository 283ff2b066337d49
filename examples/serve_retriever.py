"""Serve a corpus to other trainers, with the protocols of Search-R1 and FlashRAG.

    pip install -e ".[serve]"
    python -m examples.serve_retriever --corpus=corpus.jsonl --port=8000

`POST /retrieve` is the protocol of Search-R1 and verl; `POST /batch_search` and `POST /search` are
those of FlashRAG, ReCall and BAPO. docs/search.md describes the request bodies. To serve another
`DocumentSearch`, construct it in `main`.
"""

import argparse
import socket
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from jaxrl.envs.base import ToolError
from jaxrl.envs.search.base import DocumentSearch, Hit
from jaxrl.envs.search.bm25 import LocalSearch
from jaxrl.utils.json_io import parse_json


def search(engine: DocumentSearch, queries: Any, topk: Any) -> list[list[Hit]]:
    """Search for each query; return lists of hits.

    Raises:
        ValueError: The request is malformed.
        ToolError: A search failed.
    """
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise ValueError(f"the queries are {queries!r:.80}; expected a list of strings")
    topk = engine.topk if topk is None else topk
    if type(topk) is not int or topk < 1:
        raise ValueError(f"the number of documents is {topk!r:.80}; expected a positive integer")
    results = []
    for result in engine.retrieve(queries, topk) if queries else []:
        if isinstance(result, ToolError):
            raise result
        results.append(result)
    return results


def format_hit(hit: Hit) -> dict[str, str]:
    return {"id": hit.document.id, "contents": hit.document.contents}


def handle_search_r1(engine: DocumentSearch, body: dict[str, Any]) -> Any:
    """Handle a Search-R1 request: `{"queries", "topk", "return_scores"}`."""
    results = search(engine, body.get("queries"), body.get("topk"))
    if body.get("return_scores"):
        results_with_scores = [
            [{"document": format_hit(h), "score": h.score} for h in hits] for hits in results
        ]
        return {"result": results_with_scores}
    return {"result": [[format_hit(hit) for hit in hits] for hits in results]}


def handle_flashrag(engine: DocumentSearch, body: dict[str, Any]) -> Any:
    """Handle a FlashRAG batch: `{"query", "top_n", "return_score"}`, with a list of queries."""
    results = search(engine, body.get("query"), body.get("top_n"))
    documents = [[format_hit(hit) for hit in hits] for hits in results]
    if body.get("return_score"):
        return [documents, [[hit.score for hit in hits] for hits in results]]
    return documents


def handle_flashrag_single(engine: DocumentSearch, body: dict[str, Any]) -> Any:
    """Handle a FlashRAG request with a single query as `query`."""
    handle = handle_flashrag(engine, body | {"query": [body.get("query")]})
    return [part[0] for part in handle] if body.get("return_score") else handle[0]


PROTOCOLS = {
    "/retrieve": handle_search_r1,
    "/batch_search": handle_flashrag,
    "/search": handle_flashrag_single,
}


def make_app(engine: DocumentSearch) -> Starlette:
    """Build the server application; requests run concurrently in threads."""

    def make_route(path: str, protocol: Callable[[DocumentSearch, dict[str, Any]], Any]) -> Route:
        async def handle(request: Request) -> JSONResponse:
            body = parse_json(await request.body(), "the body")
            if not isinstance(body, dict):
                raise ValueError(f"the body is a {type(body).__name__}; expected an object")
            return JSONResponse(await run_in_threadpool(protocol, engine, body))

        return Route(path, handle, methods=["POST"])

    def make_error_response(_: Request, error: Exception) -> JSONResponse:
        status = 503 if isinstance(error, ToolError) else 400
        return JSONResponse({"detail": str(error)}, status)

    return Starlette(
        routes=[make_route(path, protocol) for path, protocol in PROTOCOLS.items()],
        exception_handlers={ValueError: make_error_response, ToolError: make_error_response},
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--corpus", required=True, help="JSONL of documents")
    parser.add_argument(
        "--index", default="", help="folder of the index (default: next to the corpus)"
    )
    parser.add_argument("--topk", type=int, default=3, help="documents per query by default")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 for other machines")
    parser.add_argument("--port", type=int, default=8000, help="port; 0 for any free port")
    args = parser.parse_args(argv)
    engine = LocalSearch(args.corpus, args.index, topk=args.topk)
    listener = socket.create_server((args.host, args.port), backlog=1024)
    host, port = listener.getsockname()[:2]
    print(f"serving {args.corpus} at http://{host}:{port} ({', '.join(PROTOCOLS)})", flush=True)
    uvicorn.Server(uvicorn.Config(make_app(engine), log_level="warning")).run(sockets=[listener])


if __name__ == "__main__":
    main()

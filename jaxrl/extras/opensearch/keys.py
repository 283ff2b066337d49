"""Keys of OpenSearch and Elasticsearch."""

from jaxrl.keys import FREE, Key

# fmt: off
KEYS = {
    "search.opensearch.url": Key("", "Address of the cluster, as `https://search:9200`.",
        required="the address of a server, as http://127.0.0.1:8000", restart=FREE),
    "search.opensearch.index": Key("", "Name of the index, or an alias.",
        required="the name of an index"),
    "search.opensearch.fields": Key(("title", "text"), "Fields of a document: title and text, or "
        "its text alone."),
    "search.opensearch.topk": Key(3, "Documents that a query returns.", above=0),
    "search.opensearch.auth": Key("", "`basic:VARIABLE`, `api_key:VARIABLE` or `bearer:VARIABLE`, "
        "with the environment variable that holds `user:password`, the encoded key, or the token. "
        "Empty: none.", restart=FREE),
    "search.opensearch.timeout_s": Key(30.0, "Seconds of a request, to the last byte of its "
        "answer.", above=0, restart=FREE),
    "search.opensearch.connections": Key(8, "Requests in flight at most.", above=0, restart=FREE),
    "search.opensearch.batch_size": Key(64, "Queries in a request at most.", above=0, restart=FREE),
}
# fmt: on

"""Keys of dense retrieval."""

from jaxrl.config.keys import CORPUS, DTYPES, MODEL, Key

# fmt: off
KEYS = {
    "search.dense.corpus": Key("", "JSONL of documents: `id`, `title`, `text`.",
        required="a path", holds=CORPUS),
    "search.dense.encoder": Key("", "Local folder in Hugging Face's format: BERT (E5, BGE) or "
        "Qwen3-Embedding.", required="a path", holds=MODEL),
    "search.dense.index": Key("", "Folder of the vectors. Empty: a folder `index` beside the "
        "corpus."),
    "search.dense.embeddings": Key("", "Vectors made elsewhere, in the order of the corpus: `.npy` "
        "[N, D], or a FAISS flat index (extra `faiss`). Empty: the encoder makes them.",
        holds=CORPUS),
    "search.dense.topk": Key(3, "Documents that a query returns.", above=0),
    "search.dense.dtype": Key("float32", "Dtype of the vectors on the devices: `float32`, "
        "`bfloat16`, or `int8` with a scale for each vector. The best candidates are scored again "
        "by the vectors in the file.", one_of=(*DTYPES, "int8")),
    "search.dense.file_dtype": Key("float32", "Dtype of the vectors in the file; `bfloat16` has "
        "half the size.", one_of=DTYPES),
    "search.dense.devices": Key("run", "`run`: those of each process, which split the passages; "
        "`cpu`: the host's.", one_of=("run", "cpu")),
    "search.dense.candidates": Key(100, "Documents of a query that are scored again, at least.",
        above=0),
    "search.dense.query_rows": Key(16, "Queries searched at once.", above=0),
    "search.dense.pooling": Key("", "How hidden states become a vector: `mean`, `first` (token) or "
        "`last`. Empty: as the encoder's folder says.", one_of=("", "mean", "first", "last")),
    "search.dense.query_prefix": Key("auto", "Text before a query, as `query: ` (E5) or `Instruct: "
        "<task>\\nQuery:` (Qwen3-Embedding). `auto`: as the encoder's folder says, and "
        "Qwen3-Embedding's own where it says nothing."),
    "search.dense.passage_prefix": Key("auto", "Text before a document, as `passage: ` (E5). "
        "`auto`: likewise."),
    "search.dense.max_tokens": Key(512, "Tokens of a text at most, prefix included; the rest is "
        "cut off.", above=0),
    "search.dense.encoder_dtype": Key("float32", "Dtype of the encoder's weights and activations.",
        one_of=DTYPES),
    "search.dense.batch_tokens": Key(16_384, "Tokens of documents that each device encodes at "
        "once, padding included.", above=0),
    "search.dense.query_batch_tokens": Key(256, "Tokens of queries that each device encodes at "
        "once.", above=0),
    "search.hybrid.topk": Key(3, "Documents that a query returns, of `search.local` and "
        "`search.dense`.", above=0),
    "search.hybrid.k": Key(60.0, "A document scores the sum of 1 / (`k` + rank) over both engines: "
        "the larger `k`, the less the first ranks count before those behind them.", at_least=0),
    "search.hybrid.candidates": Key(100, "Documents of each engine that are fused.", above=0),
}
# fmt: on

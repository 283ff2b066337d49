"""Config keys for dense retrieval and hybrid search."""

from jaxrl.config.keys import CORPUS, DTYPES, MODEL, Key

# fmt: off
KEYS = {
    "search.dense.corpus": Key("", "JSONL of documents: `id`, `title`, `text`.",
        required="a path", holds=CORPUS),
    "search.dense.encoder": Key("", "Folder in Hugging Face format, or `hf://org/name`: BERT (E5, "
        "BGE) or Qwen3-Embedding.", required="a path", holds=MODEL),
    "search.dense.index": Key("", "Folder of the vectors. Empty: `index` next to the corpus."),
    "search.dense.embeddings": Key("", "Precomputed vectors in the order of the corpus: `.npy` "
        "[N, D], or a FAISS flat index (extra `faiss`). Empty: computed by the encoder.",
        holds=CORPUS),
    "search.dense.topk": Key(3, "Documents per query.", above=0),
    "search.dense.dtype": Key("float32", "Dtype of the vectors on the devices: `float32`, "
        "`bfloat16`, or `int8` with one scale per vector. The best candidates are scored again "
        "from the file.", one_of=(*DTYPES, "int8")),
    "search.dense.file_dtype": Key("float32", "Dtype of the vectors in the file.", one_of=DTYPES),
    "search.dense.devices": Key("run", "`run`: the devices of each process, which split the "
        "passages; `cpu`: the host.", one_of=("run", "cpu")),
    "search.dense.candidates": Key(100, "Minimum number of candidates per query to score again.",
        above=0),
    "search.dense.query_rows": Key(16, "Queries per batch.", above=0),
    "search.dense.pooling": Key("", "Pooling of hidden states: `mean`, `first` or `last` token. "
        "Empty: from the encoder's folder.", one_of=("", "mean", "first", "last")),
    "search.dense.query_prefix": Key("auto", "Text before a query, such as `query: ` (E5). "
        "`auto`: from the encoder's folder, or the default of Qwen3-Embedding."),
    "search.dense.passage_prefix": Key("auto", "Text before a document, such as `passage: ` "
        "(E5). `auto`: as for queries."),
    "search.dense.max_tokens": Key(512, "Maximum tokens of a text, including the prefix; longer "
        "texts are truncated.", above=0),
    "search.dense.encoder_dtype": Key("float32", "Dtype of the encoder's weights and activations.",
        one_of=DTYPES),
    "search.dense.batch_tokens": Key(16_384, "Tokens of documents that each device encodes at "
        "once, including padding.", above=0),
    "search.dense.query_batch_tokens": Key(256, "Tokens of queries that each device encodes at "
        "once.", above=0),
    "search.hybrid.topk": Key(3, "Documents per query.", above=0),
    "search.hybrid.k": Key(60.0, "Constant of reciprocal rank fusion: a document scores the sum "
        "of 1 / (`k` + rank).", at_least=0),
    "search.hybrid.candidates": Key(100, "Documents of each engine that are fused.", above=0),
}
# fmt: on

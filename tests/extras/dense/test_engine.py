"""Dense retrieval as an engine: from a corpus and an encoder's folder to documents."""

import shutil
import threading

import numpy as np
import pytest

from configs import debug_tiny
from jaxrl.builders import environment
from jaxrl.builders.fingerprints import compute_fingerprints
from jaxrl.builders.resolved import resolve_names
from jaxrl.envs.search.base import Document, Hit
from jaxrl.envs.search.bm25 import LocalSearch
from jaxrl.envs.search.corpus import read_corpus
from jaxrl.extras.dense.hybrid import HybridSearch, fuse_rankings
from tests.extras.dense.mesh_search import brute_force
from tests.extras.dense.worlds import ENCODER, PREFIXES, dense, write_corpus
from tests.toys import count_compilations

pytestmark = pytest.mark.usefixtures("quick_compilation")

QUERIES = ["who built the bridge", "Ada Kerr?", "river 1871", "bread " * 30, "x"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("dense") / "corpus.jsonl", 60)


@pytest.fixture(scope="module")
def engine(corpus, quick_compilation):
    return dense(corpus)


def document_numbers(hits):
    return [[int(hit.document.id[1:]) for hit in of_query] for of_query in hits]


def test_it_finds_the_documents_of_the_largest_products(engine, corpus):
    documents = list(read_corpus(corpus))
    contents = [document.contents for document in documents]
    passages = engine._encoder.encode_passages(contents, batch_tokens=256)
    queries = engine._encoder.encode_queries(QUERIES, batch_tokens=512)
    expected, scores = brute_force(passages, queries, topk=4)
    hits = engine.retrieve(QUERIES, 4)
    assert document_numbers(hits) == expected.tolist()
    np.testing.assert_allclose([[hit.score for hit in row] for row in hits], scores, atol=1e-6)
    assert hits[0][0].document == documents[expected[0, 0]]
    assert len({tuple(row) for row in expected.tolist()}) > 1  # it matters what is asked


def test_a_query_is_answered_alike_whatever_is_asked_beside_it(engine):
    together = engine.retrieve(QUERIES * 9, 3)
    alone = [engine.retrieve([query], 3)[0] for query in QUERIES]
    assert together == alone * 9
    assert engine.retrieve([], 3) == []


def test_threads_share_the_engine_and_its_programs(engine):
    expected = engine.run_batch(QUERIES)
    answers = {}
    with count_compilations() as compiled:
        threads = [
            threading.Thread(target=lambda i=i: answers.update({i: engine.run_batch(QUERIES)}))
            for i in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert list(answers.values()) == [expected] * 6
    assert compiled == []


def test_hostile_queries_are_plain_text(engine):
    hostile = ["x " * 50_000, "a AND (b", '"', "title:x", "\ud800", "[SEP] [CLS]", "漢字", "-"]
    answers = engine.run_batch(hostile)
    assert all(answer.startswith("Doc 1(Title: ") for answer in answers)


def npy(path, vectors):
    np.save(path, vectors)
    return str(path)


def faiss_index(path, vectors, kind="IndexFlatIP"):
    import faiss

    index = getattr(faiss, kind)(vectors.shape[1])
    index.add(vectors)
    faiss.write_index(index, str(path))
    return str(path)


def half(path, vectors):
    return npy(path, vectors.astype(np.float16))


@pytest.mark.parametrize("write", [half, faiss_index])
def test_prebuilt_vectors_are_used(tmp_path, corpus, engine, write):
    vectors = np.array(engine._passages.vectors)
    swapped = vectors[[*range(8), 9, 8, *range(10, 60)]]  # to see that they are what is searched
    path = tmp_path / ("flat.index" if write is faiss_index else "vectors.npy")
    precomputed = dense(corpus, index=str(tmp_path), embeddings=write(path, swapped))
    np.testing.assert_allclose(
        precomputed._passages.vectors, swapped, atol=4e-3 if write is half else 0
    )
    query = swapped[8:9]
    assert precomputed._passages.search(query, 1)[0] == [[8]]


def test_vectors_of_something_else_are_refused(tmp_path, corpus, engine):
    vectors = np.array(engine._passages.vectors)
    others = np.random.default_rng(0).standard_normal(vectors.shape).astype(np.float32)
    (tmp_path / "text.npy").write_text("no numbers")
    for embeddings, message in (
        (npy(tmp_path / "few.npy", vectors[:-1]), r"shape \[59, 32\]; expected \[60, 32\]"),
        (npy(tmp_path / "other.npy", others), "differ from the encoder's: cosines"),
        (faiss_index(tmp_path / "l2.index", vectors, "IndexFlatL2"), "IndexFlatL2; expected an"),
        (str(tmp_path / "text.npy"), "is not an .npy file of numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            dense(corpus, index=str(tmp_path), embeddings=embeddings)


def test_a_missing_corpus_is_refused_by_key():
    with pytest.raises(OSError, match=r"no corpus at nowhere.jsonl.*dense.corpus"):
        dense("nowhere.jsonl")


def test_a_run_belongs_to_its_encoder_and_vectors(tmp_path, corpus, engine):
    encoder = shutil.copytree(ENCODER, tmp_path / "encoder")
    config = debug_tiny.get_config()
    config.search.engine = "dense"
    config.search.dense.corpus, config.search.dense.encoder = str(corpus), str(encoder)
    config.search.dense.embeddings = npy(tmp_path / "a.npy", np.array(engine._passages.vectors))
    before = compute_fingerprints(resolve_names(config))
    (encoder / "config.json").write_text("{}")
    config.search.dense.embeddings = npy(tmp_path / "b.npy", np.zeros((60, 32)))
    after = compute_fingerprints(resolve_names(config))
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {"search.dense.encoder/config.json", "search.dense.embeddings"}
    assert {"search.dense.corpus", "search.dense.encoder/model.safetensors"} <= before.keys()


def test_the_configuration_names_the_engine_and_its_settings(tmp_path, corpus, engine):
    config = debug_tiny.get_config()
    config.search.engine = "dense"
    settings = {"corpus": str(corpus), "encoder": str(ENCODER), "index": str(tmp_path), **PREFIXES}
    config.search.dense.update(settings)
    built = environment._instantiate_search_engine(
        resolve_names(config), lambda _: None, lambda _: None
    )
    assert built.run_batch(QUERIES) == engine.run_batch(QUERIES)


@pytest.fixture(scope="module")
def hybrid(corpus):
    settings = {"encoder": str(ENCODER), **PREFIXES, "corpus": str(corpus)}
    return HybridSearch(local={"corpus": "", "index": "", "topk": 9}, dense=settings, topk=3)


def hits(*ids):
    return [Hit(Document(id, "", id), 1.0) for id in ids]


def test_fusion_by_hand():
    fused = fuse_rankings([hits("a", "b", "c"), hits("c", "d")], k=60, topk=3)
    # c: 1/63 + 1/61; a: 1/61; b and d: 1/62 each, of which b comes first by its id.
    assert [hit.document.id for hit in fused] == ["c", "a", "b"]
    assert [hit.score for hit in fused] == [1 / 63 + 1 / 61, 1 / 61, 1 / 62]
    # With a k of 0 the first places loss_weights so much that c, third and first, still beats a.
    assert [hit.document.id for hit in fuse_rankings([hits("a", "b"), hits("b")], k=0, topk=1)] == [
        "b"
    ]


def test_equal_sums_are_equal_whatever_rounding_makes_of_them():
    # 1/3 + 1/4 = 1/2 + 1/12, of which the second is larger in floating point; a precedes b.
    assert 1 / 3 + 1 / 4 < 1 / 2 + 1 / 12
    first = ["x1", "b", "a", *(f"y{i}" for i in range(9))]
    second = [*(f"z{i}" for i in range(3)), "a", *(f"w{i}" for i in range(7)), "b"]
    fused = [hit.document.id for hit in fuse_rankings([hits(*first), hits(*second)], k=0, topk=30)]
    assert fused.index("a") < fused.index("b")
    swapped = [
        hit.document.id for hit in fuse_rankings([hits(*second), hits(*first)], k=0, topk=30)
    ]
    assert swapped == fused


def test_hybrid_fuses_both_engines(corpus, engine, hybrid):
    local = LocalSearch(corpus)
    fused = hybrid.retrieve(QUERIES, 4)
    for query, ranking in zip(QUERIES, fused, strict=True):
        rankings = [each.retrieve([query], 100)[0] for each in (local, engine)]
        assert ranking == fuse_rankings(rankings, k=60, topk=4)
    assert fused != engine.retrieve(QUERIES, 4)
    assert fused != local.retrieve(QUERIES, 4)
    assert len(hybrid.run(QUERIES[0]).splitlines()) == 3

"""Dense retrieval as an engine: from a corpus and an encoder's folder to documents."""

import inspect
import json
import shutil
import threading

import jax
import numpy as np
import pytest

from configs import debug_tiny
from jaxrl.builders import environment
from jaxrl.builders.fingerprints import fingerprints
from jaxrl.builders.resolved import resolve_names
from jaxrl.builders.validation import validate
from jaxrl.config import default_config
from jaxrl.config.registry import resolve
from jaxrl.envs.search.base import ENGINES, Document, Hit
from jaxrl.envs.search.bm25 import LocalSearch
from jaxrl.envs.search.corpus import read_corpus
from jaxrl.envs.search.random_search import RandomSearch
from jaxrl.extras.dense.engine import DenseSearch
from jaxrl.extras.dense.hybrid import HybridSearch, fuse
from tests.extras.dense.mesh_search import brute_force
from tests.extras.dense.worlds import ENCODER, PREFIXES, dense, documents, write_corpus
from tests.helpers import ROOT, blocks
from tests.toys import count_compilations

pytestmark = pytest.mark.usefixtures("quick_compilation")

QUERIES = ["who built the bridge", "Ada Kerr?", "river 1871", "bread " * 30, "x"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("dense") / "corpus.jsonl", 60)


@pytest.fixture(scope="module")
def engine(corpus, quick_compilation):
    return dense(corpus)


def places(hits):
    return [[int(hit.document.id[1:]) for hit in one] for one in hits]


def test_it_finds_the_documents_of_the_largest_products(engine, corpus):
    found = list(read_corpus(corpus))
    passages = engine._encoder.encode_passages([one.contents for one in found], batch_tokens=256)
    queries = engine._encoder.encode_queries(QUERIES, batch_tokens=512)
    wanted, scores = brute_force(passages, queries, topk=4)
    hits = engine.retrieve(QUERIES, 4)
    assert places(hits) == wanted.tolist()
    np.testing.assert_allclose([[hit.score for hit in one] for one in hits], scores, atol=1e-6)
    assert hits[0][0].document == found[wanted[0, 0]]
    assert len({tuple(row) for row in wanted.tolist()}) > 1  # it matters what is asked


def test_a_query_is_answered_alike_whatever_is_asked_beside_it(engine):
    together = engine.retrieve(QUERIES * 9, 3)
    alone = [engine.retrieve([query], 3)[0] for query in QUERIES]
    assert together == alone * 9
    assert engine.retrieve([], 3) == []


def test_threads_share_the_engine_and_its_programs(engine):
    wanted = engine.run_batch(QUERIES)
    found = {}
    with count_compilations() as compiled:
        threads = [
            threading.Thread(target=lambda i=i: found.update({i: engine.run_batch(QUERIES)}))
            for i in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert list(found.values()) == [wanted] * 6
    assert compiled == []


def test_hostile_queries_are_plain_text(engine):
    hostile = ["x " * 50_000, "a AND (b", '"', "title:x", "\ud800", "[SEP] [CLS]", "漢字", "-"]
    answers = engine.run_batch(hostile)
    assert all(isinstance(one, str) and one.startswith("Doc 1(Title: ") for one in answers)


def test_the_configuration_has_the_engines_settings_and_defaults():
    config = default_config().search.dense.to_dict()
    parameters = inspect.signature(DenseSearch).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    del defaults["progress"]
    assert config == {**defaults, "corpus": "", "encoder": ""}
    for name, kind in (("dense", DenseSearch), ("hybrid", HybridSearch)):
        assert resolve("search.engine", name, ENGINES, example="") is kind


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


@pytest.mark.parametrize("write", [npy, half, faiss_index])
def test_prebuilt_vectors_are_used(tmp_path, corpus, engine, write):
    vectors = np.array(engine._passages.vectors)
    swapped = vectors[[*range(8), 9, 8, *range(10, 60)]]  # to see that they are what is searched
    path = tmp_path / ("flat.index" if write is faiss_index else "vectors.npy")
    prebuilt = dense(corpus, index=str(tmp_path), embeddings=write(path, swapped))
    np.testing.assert_allclose(
        prebuilt._passages.vectors, swapped, atol=4e-3 if write is half else 0
    )
    query = swapped[8:9]
    assert prebuilt._passages.search(query, 1)[0] == [[8]]


def test_vectors_of_something_else_are_refused(tmp_path, corpus, engine):
    vectors = np.array(engine._passages.vectors)
    others = np.random.default_rng(0).standard_normal(vectors.shape).astype(np.float32)
    (tmp_path / "text.npy").write_text("no numbers")
    (tmp_path / "text.index").write_text("no index")
    for embeddings, message in (
        (npy(tmp_path / "few.npy", vectors[:-1]), r"shape \[59, 32\]; expected \[60, 32\]"),
        (npy(tmp_path / "narrow.npy", vectors[:, :-1]), r"shape \[60, 31\]"),
        (npy(tmp_path / "flat.npy", vectors[0]), r"float32 \(32,\); expected floats \[N, D\]"),
        (npy(tmp_path / "ids.npy", vectors.astype(int)), r"int64 \(60, 32\); expected floats"),
        (npy(tmp_path / "other.npy", others), "differ from the encoder's: cosines"),
        (
            faiss_index(tmp_path / "l2.index", vectors, "IndexFlatL2"),
            "IndexFlatL2; expected an Ind",
        ),
        (str(tmp_path / "text.npy"), "is not an .npy file of numbers"),
        (str(tmp_path / "text.index"), "is neither .npy nor a FAISS index"),
        (str(tmp_path / "none.npy"), "there is no such file"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            dense(corpus, index=str(tmp_path), embeddings=embeddings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"corpus": "nowhere.jsonl"}, "no corpus at nowhere.jsonl.*dense.corpus"),
        ({"encoder": "nowhere"}, "encoder is 'nowhere', which is not a folder"),
        ({"query_prefix": "auto"}, r"set config.search.dense.query_prefix to 'query: '"),
        ({"index": str(ENCODER / "config.json")}, "is a file; name a folder"),
    ],
)
def test_wrong_settings_are_refused(corpus, settings, message):
    with pytest.raises((OSError, ValueError), match=message):
        dense(**{"corpus": corpus, **settings})


def test_a_run_belongs_to_its_encoder_and_vectors(tmp_path, corpus, engine):
    encoder = shutil.copytree(ENCODER, tmp_path / "encoder")
    config = debug_tiny.get_config()
    config.search.engine = "dense"
    config.search.dense.corpus, config.search.dense.encoder = str(corpus), str(encoder)
    config.search.dense.embeddings = npy(tmp_path / "a.npy", np.array(engine._passages.vectors))
    before = fingerprints(resolve_names(config))
    (encoder / "config.json").write_text("{}")
    config.search.dense.embeddings = npy(tmp_path / "b.npy", np.zeros((60, 32)))
    after = fingerprints(resolve_names(config))
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {"search.dense.encoder/config.json", "search.dense.embeddings"}
    assert {"search.dense.corpus", "search.dense.encoder/model.safetensors"} <= before.keys()


def shown():
    """What the document sets, block by block."""
    shown = blocks(ROOT / "docs" / "search.md", "python")
    for code in (code for code in shown if "dense.encoder" in code):
        config = debug_tiny.get_config()
        exec(code, {"config": config})
        yield config


@pytest.mark.parametrize("config", [*shown()], ids=lambda config: config.search.dense.encoder)
def test_what_the_document_shows_finds_something(tmp_path, corpus, config):
    validate(config)
    kind = {"e5": "encoder_e5", "bge": "encoder_bge", "Qwen3": "encoder_qwen3"}
    [name] = [ours for theirs, ours in kind.items() if theirs in config.search.dense.encoder]
    config.search.dense.encoder = str(ENCODER.parent / name)
    config.search.dense.corpus = str(corpus)
    config.search.dense.index = config.search.local.index = str(tmp_path)
    found = environment._build_engine(
        resolve_names(config), lambda _: None, lambda _: None
    ).run_batch(QUERIES)
    assert all(len(one.splitlines()) == 3 for one in found)


def test_the_hosts_processor_by_key(corpus, engine):
    assert dense(corpus, devices="cpu").retrieve(QUERIES, 3) == engine.retrieve(QUERIES, 3)
    assert {one.platform for one in engine._passages._passages.devices()} == {jax.default_backend()}


def test_documents_drawn_at_random_are_those_of_any_engine_over_the_corpus(corpus, engine):
    settings = {"encoder": str(ENCODER), **PREFIXES, "corpus": str(corpus)}
    hybrid = HybridSearch(local={"corpus": "", "index": "", "topk": 9}, dense=settings, topk=3)
    three = dense(corpus, topk=3)
    drawn = [RandomSearch(one, seed=5) for one in (LocalSearch(corpus, topk=3), three, hybrid)]
    found = [one.run_batch(QUERIES) for one in drawn]
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == len(QUERIES)
    assert found[0] != three.run_batch(QUERIES)


def hits(*ids):
    return [Hit(Document(id, "", id), 1.0) for id in ids]


def test_fusion_by_hand():
    fused = fuse([hits("a", "b", "c"), hits("c", "d")], k=60, topk=3)
    # c: 1/63 + 1/61; a: 1/61; b and d: 1/62 each, of which b comes first by its id.
    assert [hit.document.id for hit in fused] == ["c", "a", "b"]
    assert [hit.score for hit in fused] == [1 / 63 + 1 / 61, 1 / 61, 1 / 62]
    # With a k of 0 the first places loss_weights so much that c, third and first, still beats a.
    assert [hit.document.id for hit in fuse([hits("a", "b"), hits("b")], k=0, topk=1)] == ["b"]


def test_equal_sums_are_equal_whatever_rounding_makes_of_them():
    # 1/3 + 1/4 = 1/2 + 1/12, of which the second is larger in floating point; a precedes b.
    assert 1 / 3 + 1 / 4 < 1 / 2 + 1 / 12
    first = ["x1", "b", "a", *(f"y{i}" for i in range(9))]
    second = [*(f"z{i}" for i in range(3)), "a", *(f"w{i}" for i in range(7)), "b"]
    fused = [hit.document.id for hit in fuse([hits(*first), hits(*second)], k=0, topk=30)]
    assert fused.index("a") < fused.index("b")
    swapped = [hit.document.id for hit in fuse([hits(*second), hits(*first)], k=0, topk=30)]
    assert swapped == fused


def test_hybrid_fuses_both_engines(tmp_path, corpus, engine):
    settings = {"encoder": str(ENCODER), **PREFIXES, "corpus": str(corpus)}
    hybrid = HybridSearch(local={"corpus": "", "index": "", "topk": 9}, dense=settings, topk=4)
    local = LocalSearch(corpus)
    found = hybrid.retrieve(QUERIES, 4)
    for query, one in zip(QUERIES, found, strict=True):
        rankings = [each.retrieve([query], 100)[0] for each in (local, engine)]
        assert one == fuse(rankings, k=60, topk=4)
    assert found != engine.retrieve(QUERIES, 4)
    assert found != local.retrieve(QUERIES, 4)
    assert len(hybrid.run(QUERIES[0]).splitlines()) == 4


def test_documents_of_either_spelling_and_blank_lines(tmp_path):
    lines = [
        '{"id": 3, "contents": "\\"A title\\"\\nThe text"}',
        "",
        *map(json.dumps, documents(3)),
    ]
    lines.insert(2, "\ufeff".join(["", '{"id": "x", "title": "", "text": "only text"}']))
    path = tmp_path / "corpus.jsonl"
    path.write_text("\r\n".join(lines) + "\n\n", encoding="utf-8")
    engine = dense(path)
    found = {hit.document.id: hit.document for hit in engine.retrieve(["x"], 9)[0]}
    assert found == {one.id: one for one in read_corpus(path)}
    texts = ['"A title"\nThe text', "only text"]  # what is encoded
    expected = engine._encoder.encode_passages(texts, batch_tokens=256)
    np.testing.assert_array_equal(engine._passages.vectors[:2], expected)

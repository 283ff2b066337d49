import collections
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import unicodedata
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxrl.envs.base import ToolError
from jaxrl.envs.search import bm25 as bm25_index
from jaxrl.envs.search.base import Document
from jaxrl.envs.search.bm25 import LocalSearch, tokenize
from jaxrl.envs.tools.base import run_call
from tests.helpers import as_nobody

CITIES = [
    Document("1", "Paris", "Paris is the capital of France."),
    Document("2", "Berlin", "Berlin is the capital of Germany. It is not Paris."),
    Document("3", "北京", "北京市是中华人民共和国的首都。"),
    Document("4", "東京タワー", "とうきょうにある"),
]


def write_corpus(folder, documents):
    path = Path(folder) / "corpus.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(d._asdict()) + "\n" for d in documents), encoding="utf-8")
    return path


def make_search(folder, documents, **options):
    return LocalSearch(write_corpus(folder, documents), Path(folder) / "index", **options)


def ids(engine, query):
    return [hit.document.id for hit in engine.retrieve([query], engine.topk)[0]]


def indexes(folder):
    return sorted(
        p.name for p in (Path(folder) / "index").iterdir() if p.name not in ("lock", "digests.json")
    )


# Tokens and text


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("The U.S.-born poet", ["the", "u", "s", "born", "poet"]),
        ("Café Ｐａｒｉｓ cafe\u0301", ["café", "paris", "café"]),
        ("北京市", ["北京", "京市"]),
        ("서울특별시 한국", ["서울", "울특", "특별", "별시", "한국"]),
        ("l´amour ¨ 1\ufe0f\u20e3", ["l", "amour", "1"]),  # accents without a letter, a keycap
        ("हिन्दी। कि१२", ["हिन्दी", "कि१२"]),
        ("العَرَبِيَّة، مدرّسة", ["العَرَبِيَّة", "مدرّسة"]),
        ("น้ำดี ปี๒๕๖๐", ["น้ํา", "าดี", "ปี", "๒๕๖๐"]),
        ("ភាសាខ្មែរ", ["ភាសា", "សាខ្", "ខ្មែ", "មែរ"]),
        ("あ\u3099い゚う", ["あ\u3099い゚", "い゚う"]),
        ("𝔄𝔟𝔠 ﬁne", ["abc", "fine"]),
    ],
)
def test_tokenize(text, tokens):
    assert tokenize(text) == tokens


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("Donau\xaddampf\u200bschiff", "Donaudampfschiff"),
        ("क्\u200dष क्\u200cष", "क्ष क्ष"),
        ("\ufeffstart\u2060end\u200e", "startend"),
        ("한\u200d글 ㅎ\u3164ㅏ", "한글 ㅎㅏ"),
    ],
)
def test_invisible_characters_change_no_token(text, plain):
    assert tokenize(text) == tokenize(plain)


any_script = st.sampled_from(
    [
        *("é", "ß", "İ", "Σ", "ḍ̇", "ế", "한국", "が", "ガ", "ﾊﾟ"),
        *("क़ि", "אָ", "لا", "น้ำ", "ဦး", "ᾳ", "Å", "½", " -"),
    ]
)


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(any_script | st.characters(exclude_categories=["Cs"]), max_size=8).map("".join))
def test_all_unicode_normal_forms_have_the_same_tokens(text):
    tokens = tokenize(text)
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        assert tokenize(unicodedata.normalize(form, text)) == tokens
    hidden = "\u200d".join(text)
    assert tokenize(f"\xad{hidden}\u2060") == tokens
    assert not any(re.search(r"\s", token) or unicodedata.combining(token[0]) for token in tokens)


# Searching


HOSTILE = {
    "the same words again": "paris title:x AND (" * 6_000,
    "punctuation": '"(~^*' * 20_000,
    "a lone surrogate": "\ud800paris \udfff",
    "operators": 'paris AND -title:"x" +(* [a TO b] {1 TO 2] ~3 ^4 /x/ \\',
    "Han": "北京" * 50_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_queries_are_plain_words_and_fast(tmp_path, name):
    engine = make_search(tmp_path, CITIES)
    start = time.perf_counter()
    best = ids(engine, HOSTILE[name])[:1]
    assert time.perf_counter() - start < 2
    assert best == {"punctuation": [], "Han": ["3"]}.get(name, ["1"])


def test_search_r1_corpus(tmp_path):
    path = tmp_path / "wiki.jsonl"
    record = {"id": 7, "contents": '"Eiffel Tower"\nA tower\nin Paris.', "metadata": None}
    path.write_text("\ufeff" + json.dumps(record) + "\n\n", encoding="utf-8")
    engine = LocalSearch(path, tmp_path / "index")
    assert ids(engine, "eiffel") == ["7"]
    assert engine.run("eiffel") == "Doc 1(Title: Eiffel Tower) A tower\nin Paris."


def test_ties_at_the_cut_go_to_the_lowest_ids(tmp_path):
    # Far more equal documents than `topk`, stored in descending order of id.
    twins = [Document(f"{i:03}", "twin", "same words") for i in reversed(range(200))]
    better = Document("999", "twin twin twin", "twin")
    engine = make_search(tmp_path, [*twins, better], topk=3)
    assert ids(engine, "twin") == ["999", "000", "001"]


def bm25(documents, query):
    """Return the textbook scores of the documents that share a word with the query."""
    words = [tokenize(f"{d.title} {d.title} {d.text}") for d in documents]
    average = sum(map(len, words)) / len(words)
    scores = collections.Counter()
    for word in set(tokenize(query)):
        holders = [i for i, bag in enumerate(words) if word in bag]
        idf = math.log(1 + (len(words) - len(holders) + 0.5) / (len(holders) + 0.5))
        for i in holders:
            count, length = words[i].count(word), len(words[i])
            scores[i] += idf * count * 2.2 / (count + 1.2 * (0.25 + 0.75 * length / average))
    return scores


def ranking(scores):
    """Sort documents by score; scores that float32 cannot tell apart are ties, sorted by index."""
    keys, rank, previous = {}, 0, math.inf
    for i in sorted(scores, key=scores.get, reverse=True):
        rank += previous - scores[i] > 1e-5 * previous
        keys[i], previous = (rank, i), scores[i]
    return sorted(scores, key=keys.get)


some_words = st.lists(st.sampled_from(["red", "blue", "sky", "sea", "北京的", "!"]), max_size=5)
some_text = some_words.map(" ".join)
some_texts = st.tuples(some_text, some_text).filter(any)  # a title and a text, not both blank


@settings(max_examples=25, deadline=None)
@given(st.lists(some_texts, min_size=1, max_size=12), some_text, st.randoms())
def test_ranks_and_scores_equal_brute_force_bm25_in_any_order_of_lines(texts, query, random):
    documents = [Document(f"{i:02}", *pair) for i, pair in enumerate(texts)]
    scores = bm25(documents, query)
    best = ranking(scores)[:3]
    random.shuffle(documents)
    with tempfile.TemporaryDirectory() as folder:
        [hits] = make_search(folder, documents).retrieve([query], 3)
    assert [hit.document.id for hit in hits] == [f"{i:02}" for i in best]
    assert [hit.score for hit in hits] == pytest.approx([scores[i] for i in best], rel=1e-4)


# Building the index


def test_the_index_is_built_once(tmp_path, monkeypatch):
    before = make_search(tmp_path, CITIES).run("capital")
    monkeypatch.setattr(bm25_index, "_write_index", None)  # a second build would now fail
    assert make_search(tmp_path, CITIES).run("capital") == before


def test_a_changed_corpus_is_indexed_again(tmp_path):
    old = make_search(tmp_path, [Document("1", "cat", "grey")])
    new = make_search(tmp_path, [Document("1", "dog", "grey")])  # the same number of bytes
    assert ids(new, "cat") == []
    assert ids(new, "dog") == ["1"]
    assert ids(old, "cat") == ["1"]  # an engine already open is left alone


def test_a_read_only_index_works_until_it_is_damaged(open_folder):
    before = make_search(open_folder, CITIES).run("capital")
    with as_nobody():
        engine = LocalSearch(open_folder / "corpus.jsonl", open_folder / "index")
        assert engine.run("capital") == before
    [meta] = (open_folder / "index").glob("*/meta.json")
    meta.write_bytes(b"x")
    with as_nobody(), pytest.raises(ValueError, match=f"the index {meta.parent} is damaged"):
        LocalSearch(open_folder / "corpus.jsonl", open_folder / "index")


def run_python(code, *arguments):
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], cwd=os.getcwd())


BUILD_AND_DIE = """
import os, sys
from jaxrl.envs.search import bm25

def read_then_die(*arguments, read=bm25.read_corpus):
    documents = read(*arguments)
    yield next(documents)
    os._exit(9)

bm25.read_corpus = read_then_die
bm25.LocalSearch(*sys.argv[1:])
"""


def test_a_killed_build_starts_again(tmp_path):
    path = write_corpus(tmp_path, CITIES)
    assert run_python(BUILD_AND_DIE, path, tmp_path / "index").wait(60) == 9
    assert indexes(tmp_path) == ["building"]
    assert ids(LocalSearch(path, tmp_path / "index"), "Germany") == ["2"]
    assert "building" not in indexes(tmp_path)


def test_a_corpus_that_changes_while_it_is_indexed_is_refused(tmp_path):
    path = write_corpus(tmp_path, CITIES[:2])

    def change(_):
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(CITIES[2]._asdict()) + "\n")

    with pytest.raises(ValueError, match="changed while it was indexed"):
        LocalSearch(path, tmp_path / "index", progress=change)
    assert indexes(tmp_path) == []
    assert ids(LocalSearch(path, tmp_path / "index"), "北京") == ["3"]


BUILD = """
import sys
from jaxrl.envs.search import bm25

result = bm25.LocalSearch(*sys.argv[1:]).run("word 499")
assert result.startswith("Doc 1(Title: word 499)"), result
"""


def test_processes_that_start_at_once_share_one_index(tmp_path):
    path = write_corpus(tmp_path, [Document(str(i), f"word {i}", "text") for i in range(500)])
    processes = [run_python(BUILD, path, tmp_path / "index") for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert len(indexes(tmp_path)) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"id": "5", "contents": "caf\xe9"}', ":5 is not valid JSON in UTF-8"),
        (b'{"id": "5", "text": "no title"}', ":5: expected"),
        (b'{"id": 1, "contents": "Rome"}', ":5: the id '1' is already used by an earlier line"),
        (b'{"id": "5", "title": " ", "text": "\\t"}', ":5: the document '5' has neither title nor"),
    ],
)
def test_a_malformed_line_is_named_and_leaves_nothing(tmp_path, line, message):
    path = write_corpus(tmp_path, CITIES)
    good = path.read_bytes()
    path.write_bytes(good + line)
    with pytest.raises(ValueError, match=re.escape(f"{path}{message}")):
        LocalSearch(path, tmp_path / "index")
    assert indexes(tmp_path) == []
    path.write_bytes(good)
    assert ids(LocalSearch(path, tmp_path / "index"), "France") == ["1"]


def test_a_missing_or_empty_corpus_is_refused(tmp_path):
    path = tmp_path / "corpus.jsonl"
    with pytest.raises(FileNotFoundError, match=r"there is no corpus at .*corpus\.jsonl"):
        LocalSearch(path, tmp_path / "index")
    assert list(tmp_path.iterdir()) == []
    path.write_bytes(b"\n \n")
    with pytest.raises(ValueError, match="has no documents"):
        LocalSearch(path, tmp_path / "index")


def test_documents_have_the_order_of_the_corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    lines = [json.dumps({"id": str(i), "title": f"Ö{i}", "text": "x" * i}) for i in range(4)]
    path.write_text(
        f"\ufeff{lines[0]}\n\n \n{lines[1]}\r\n{lines[2]}\n{lines[3]}", encoding="utf-8"
    )
    documents = LocalSearch(path).documents
    expected = list(bm25_index.read_corpus(path))
    assert [documents[index] for index in range(len(documents))] == expected


def test_a_panic_of_the_library_is_an_error_of_the_tool(tmp_path):
    engine = make_search(tmp_path, [Document(str(i), "", f"city {i} " * 50) for i in range(50)])
    [store] = (tmp_path / "index").glob("*/*.store")
    with open(store, "r+b") as file:  # the search has it memory-mapped
        file.write(b"\xff" * (store.stat().st_size - 64))
    error = run_call(engine, "city 7")
    assert isinstance(error, ToolError)
    assert error.is_permanent
    assert f"the index {store.parent} is damaged; delete that folder" in str(error)

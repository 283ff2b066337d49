import collections
import hashlib
import json
import math
import os
import random
import re
import shutil
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
from jaxrl.envs.tools.base import run_one
from tests.helpers import as_nobody, no_file_beyond

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
        ("Ελλάδα 3.14 a_b", ["ελλάδα", "3", "14", "a_b"]),
        ("北京市", ["北京", "京市"]),
        ("首", ["首"]),
        ("iPhone手机15", ["iphone", "手机", "15"]),
        ("東京・タワー", ["東京", "タワ", "ワー"]),
        ("서울특별시 한국", ["서울", "울특", "특별", "별시", "한국"]),
        ("𠮷野家", ["𠮷野", "野家"]),
        (" -:() ", []),
        ("", []),
        ("l´amour ¨ 1\ufe0f\u20e3", ["l", "amour", "1"]),  # accents without a letter, a keycap
        ("m\u0300\u0304 d'été", ["m\u0300\u0304", "d", "été"]),
        ("हिन्दी। कि१२", ["हिन्दी", "कि१२"]),
        ("שָׁלוֹם־עֲלֵיכֶם", ["שָׁלוֹם", "עֲלֵיכֶם"]),
        ("العَرَبِيَّة، مدرّسة", ["العَرَبِيَّة", "مدرّسة"]),
        ("বাংলা தமிழ் తెలుగు ಕನ್ನಡ", ["বাংলা", "தமிழ்", "తెలుగు", "ಕನ್ನಡ"]),
        ("བོད་སྐད།", ["བོད", "སྐད"]),
        ("ዐማርኛ፡ቋንቋ Հայոց-ლექსი", ["ዐማርኛ", "ቋንቋ", "հայոց", "ლექსი"]),
        ("น้ำดี ปี๒๕๖๐", ["น้ํา", "าดี", "ปี", "๒๕๖๐"]),
        ("ພາສາລາວ", ["ພາ", "າສ", "ສາ", "າລ", "ລາ", "າວ"]),
        ("ភាសាខ្មែរ", ["ភាសា", "សាខ្", "ខ្មែ", "មែរ"]),
        ("မြန်မာ", ["မြန်", "န်မာ"]),
        ("あ\u3099い゚う", ["あ\u3099い゚", "い゚う"]),
        ("葛\U000e0100飾区", ["葛飾", "飾区"]),
        ("𝔄𝔟𝔠 ﬁne", ["abc", "fine"]),
        ("İzmir Straße", ["izmir", "straße"]),
    ],
)
def test_tokenize(text, tokens):
    assert tokenize(text) == tokens


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("Donau\xaddampf\u200bschiff", "Donaudampfschiff"),
        ("می\u200cخواهم", "میخواهم"),
        ("क्\u200dष क्\u200cष", "क्ष क्ष"),
        ("\ufeffstart\u2060end\u200e", "startend"),
        ("e\u034f\u0301te\u200d\u0301", "été"),
        ("ก\u200bข", "กข"),
        ("한\u200d글 ㅎ\u3164ㅏ", "한글 ㅎㅏ"),
        ("ΟΔΟ\xadΣ", "οδος"),
        ("H\u0331 T\u0308 J\u030c", "ẖ ẗ ǰ"),
    ],
)
def test_characters_that_nobody_sees_change_no_token(text, plain):
    assert tokenize(text) == tokenize(plain)


some_script = st.sampled_from(
    [
        "é",
        "ß",
        "İ",
        "Σ",
        "ḍ̇",
        "ế",
        "한국",
        "が",
        "ガ",
        "ﾊﾟ",
        "क़ि",
        "אָ",
        "لا",
        "น้ำ",
        "ဦး",
        "ᾳ",
        "Å",
        "½",
        " -",
    ]
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # the first draw makes tables of Unicode
@given(st.lists(some_script | st.characters(exclude_categories=["Cs"]), max_size=8).map("".join))
def test_every_normal_form_has_the_same_tokens(text):
    tokens = tokenize(text)
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        assert tokenize(unicodedata.normalize(form, text)) == tokens
    hidden = "\u200d".join(text)
    assert tokenize(f"\xad{hidden}\u2060") == tokens
    assert not any(re.search(r"\s", token) or unicodedata.combining(token[0]) for token in tokens)


# The local index


def test_local_search_renders_the_best_documents(tmp_path):
    engine = make_search(tmp_path, CITIES, topk=1)
    assert engine.run("capital of France") == (
        "Doc 1(Title: Paris) Paris is the capital of France."
    )
    assert engine.run_batch(["Germany", "?!", "nowhere"]) == [
        "Doc 1(Title: Berlin) Berlin is the capital of Germany. It is not Paris.",
        "No information found",
        "No information found",
    ]


def test_documents_come_with_their_scores(tmp_path):
    documents = [
        Document("b", "", "red"),
        Document("a", "", "red"),
        Document("c", "", "red red"),
    ]
    engine = make_search(tmp_path, documents, topk=1)
    scores = bm25(documents, "red")
    [found, none] = engine.retrieve(["red", "blue"], 3)
    assert none == []
    assert [hit.document.id for hit in found] == ["c", "a", "b"]
    assert [hit.score for hit in found] == pytest.approx([scores[2], scores[1], scores[0]], 1e-5)
    assert engine.retrieve(["red"], 2)[0] == found[:2]


NOISE = " ".join(f"w{i}" for i in range(20_000))
HOSTILE = {
    "100,000 characters": ("paris " + NOISE)[:100_000],
    "the same words again": "paris title:x AND (" * 6_000,
    "punctuation": '"(~^*' * 20_000,
    "one long word": "paris" * 20_000,
    "a lone surrogate": "\ud800paris \udfff",
    "NUL": "\0paris\0",
    "operators": 'paris AND -title:"x" +(* [a TO b] {1 TO 2] ~3 ^4 /x/ \\',
    "a field": "title:paris record:x tokens:paris",
    "Han": "北京" * 50_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_queries_are_plain_words_and_fast(tmp_path, name):
    engine = make_search(tmp_path, CITIES)
    start = time.perf_counter()
    found = ids(engine, HOSTILE[name])
    assert time.perf_counter() - start < 2
    assert found[:1] == {"punctuation": [], "one long word": [], "Han": ["3"]}.get(name, ["1"])


def test_words_beyond_the_limit_do_not_count(tmp_path):
    engine = make_search(tmp_path, CITIES)
    words = [f"w{i}" for i in range(bm25_index.MAX_QUERY_WORDS)]
    assert ids(engine, " ".join([*words[1:], "France"])) == ["1"]
    assert ids(engine, " ".join([*words, "France"])) == []


def test_search_r1_corpus(tmp_path):
    path = tmp_path / "wiki.jsonl"
    record = {"id": 7, "contents": '"Eiffel Tower"\nA tower\nin Paris.', "metadata": None}
    path.write_text("\ufeff" + json.dumps(record) + "\n\n", encoding="utf-8")
    engine = LocalSearch(path, tmp_path / "index")
    assert ids(engine, "eiffel") == ["7"]
    assert engine.run("eiffel") == "Doc 1(Title: Eiffel Tower) A tower\nin Paris."


def test_ties_at_the_cut_go_to_the_lowest_ids(tmp_path):
    # Far more equal documents than are asked for, stored in falling order of id.
    twins = [Document(f"{i:03}", "twin", "same words") for i in reversed(range(200))]
    better = Document("999", "twin twin twin", "twin")
    engine = make_search(tmp_path, [*twins, better], topk=3)
    assert ids(engine, "twin") == ["999", "000", "001"]


def test_words_of_every_script_are_found(tmp_path):
    texts = ["กรุงเทพมหานครเป็นเมืองหลวง", "हिन्दी भाषा", "שָׁלוֹם", "Lebens\xadmittel", "cafe\u0301"]
    engine = make_search(tmp_path, [Document(str(i), "", text) for i, text in enumerate(texts)])
    queries = ["เมือง", "हिन्दी", "\ufb2a\u05b8לוֹם", "LEBENSMITTEL", "café"]
    assert [ids(engine, query) for query in queries] == [["0"], ["1"], ["2"], ["3"], ["4"]]


def bm25(documents, query):
    """Scores of the documents that share a word with the query, by the textbook formula."""
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
    """Best first; scores this close, as float32 sums may be apart, count as equal: by index."""
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
def test_ranks_as_brute_force_bm25_whatever_the_order_of_lines(texts, query, random):
    documents = [Document(f"{i:02}", *pair) for i, pair in enumerate(texts)]
    best = ranking(bm25(documents, query))[:3]
    random.shuffle(documents)
    with tempfile.TemporaryDirectory() as folder:
        assert ids(make_search(folder, documents), query) == [f"{i:02}" for i in best]


# Building it


def test_the_index_is_built_once(tmp_path, monkeypatch):
    before = make_search(tmp_path, CITIES).run("capital")
    monkeypatch.setattr(bm25_index, "_write_index", None)  # a second build would now fail
    assert make_search(tmp_path, CITIES).run("capital") == before


def test_a_corpus_that_did_not_change_is_not_read_again(tmp_path, monkeypatch):
    def read(file, *about):
        reads.append(file.name)
        return hash_file(file, *about)

    def num_reads(corpus):
        reads.clear()
        LocalSearch(corpus, corpus.parent / "index")
        return len([name for name in reads if name == str(corpus)])

    reads, hash_file = [], hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", read)
    path = write_corpus(tmp_path, CITIES)
    assert num_reads(path) == 2  # it changed just now, and may change again
    os.utime(path, ns=(0, 10**18))
    assert [num_reads(path), num_reads(path)] == [1, 0]
    moved = Path(shutil.copytree(tmp_path, tmp_path / "moved")) / path.name
    assert num_reads(moved) == 0
    (moved.parent / "index" / "digests.json").write_text("[")
    assert num_reads(moved) == 1


def test_a_changed_corpus_is_indexed_again(tmp_path):
    old = make_search(tmp_path, [Document("1", "cat", "grey")])
    new = make_search(tmp_path, [Document("1", "dog", "grey")])  # the same number of bytes
    assert ids(new, "cat") == []
    assert ids(new, "dog") == ["1"]
    assert ids(old, "cat") == ["1"]  # an engine already open is left alone


def append(path, documents, before=""):
    lines = "".join(json.dumps(d._asdict()) + "\n" for d in documents)
    with path.open("a", encoding="utf-8") as file:
        file.write(before + lines)


def counted(path, index, **options):
    """An engine, and the counts of documents that its build told."""
    counts = []
    return LocalSearch(path, index, progress=counts.append, **options), counts


@pytest.fixture
def reads(monkeypatch):
    """Places where the reading of a corpus began, in lines."""
    found = []

    def read(path, known=None, read_corpus=bm25_index.read_corpus):
        found.append(known.num_lines if known else 0)
        return read_corpus(path, known)

    monkeypatch.setattr(bm25_index, "read_corpus", read)
    return found


def test_an_index_is_extended_by_appended_lines(tmp_path, reads):
    path = write_corpus(tmp_path, CITIES[:2])
    old, _ = counted(path, tmp_path / "index")
    append(path, CITIES[2:3], before="\n \n")
    longer, counts = counted(path, tmp_path / "index")
    append(path, CITIES[3:])
    longest, more = counted(path, tmp_path / "index")
    assert reads == [0, 2, 5]
    assert (counts, more) == ([3], [4])
    assert (ids(old, "北京"), ids(longer, "北京"), ids(longest, "北京")) == ([], ["3"], ["3"])
    assert [ids(engine, "東京") for engine in (old, longer, longest)] == [[], [], ["4"]]
    assert ids(longest, "capital of Germany")[0] == "2"
    assert len(indexes(tmp_path)) == 3
    # Each of them stands by itself.
    for folder in sorted((tmp_path / "index").glob("*/"))[:2]:
        shutil.rmtree(folder)
    assert [ids(engine, "capital")[0] for engine in (old, longer, longest)] == ["1"] * 3


@settings(max_examples=5, deadline=None)
@given(
    st.lists(some_texts, min_size=2, max_size=12), some_text, st.integers(1, 11), st.integers(1, 11)
)
def test_an_extended_index_finds_what_one_built_afresh_does(texts, query, first, second):
    documents = [Document(f"{i:02}", *pair) for i, pair in enumerate(texts)]
    with tempfile.TemporaryDirectory() as folder:
        path = write_corpus(folder, documents[:first])
        LocalSearch(path, Path(folder) / "index")
        for part in (documents[first : first + second], documents[first + second :]):
            append(path, part)
            extended = LocalSearch(path, Path(folder) / "index", topk=12)
        fresh = LocalSearch(path, Path(folder) / "other", topk=12)
        [found], [wanted] = (engine.retrieve([query], 12) for engine in (extended, fresh))
    assert [hit.document for hit in found] == [hit.document for hit in wanted]
    assert [h.score for h in found] == pytest.approx([h.score for h in wanted], rel=1e-5)


def test_a_corpus_that_does_not_go_on_is_read_whole(tmp_path, reads):
    path = write_corpus(tmp_path, CITIES[:2])
    LocalSearch(path, tmp_path / "index")
    content = path.read_text(encoding="utf-8")
    path.write_text(content.replace("Paris", "PARIS"), encoding="utf-8")
    append(path, CITIES[2:])
    LocalSearch(path, tmp_path / "index")
    # The last line goes on, and is another one.
    path.write_text(content.rstrip("}\n"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"corpus\.jsonl:2"):
        LocalSearch(path, tmp_path / "index")
    path.write_text(content.rstrip("\n"), encoding="utf-8")
    LocalSearch(path, tmp_path / "index")
    path.write_text(content.rstrip("\n") + " \n", encoding="utf-8")
    LocalSearch(path, tmp_path / "index")
    assert reads == [0] * 5
    # A last line without its end is whole where the next begins behind it.
    path.write_text(content.rstrip("\n"), encoding="utf-8")
    append(path, CITIES[2:], before="\r\n")
    assert ids(LocalSearch(path, tmp_path / "index"), "東京") == ["4"]
    assert reads[5:] == [1]


@pytest.mark.parametrize("part", ["ids", "corpus.json", "meta.json"])
def test_an_index_that_is_damaged_is_not_extended(tmp_path, reads, part):
    path = write_corpus(tmp_path, CITIES[:2])
    LocalSearch(path, tmp_path / "index")
    [file] = (tmp_path / "index").glob(f"*/{part}")
    file.write_bytes(b"x" * 8)
    append(path, CITIES[2:])
    assert ids(LocalSearch(path, tmp_path / "index"), "東京") == ["4"]
    assert reads == [0, 0]


def test_appended_documents_are_checked(tmp_path):
    path = write_corpus(tmp_path, CITIES[:2])
    LocalSearch(path, tmp_path / "index")
    append(path, [CITIES[2], CITIES[0]])
    with pytest.raises(ValueError, match="jsonl:4: the id '1' is already used by an earlier line"):
        LocalSearch(path, tmp_path / "index")
    assert len(indexes(tmp_path)) == 1


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path):
    documents = [Document(str(i), str(i**7), str(7**i)) for i in range(300)]
    path = write_corpus(tmp_path, documents)
    with no_file_beyond(1000), pytest.raises(OSError, match=r"index of .*corpus\.jsonl could not"):
        LocalSearch(path, tmp_path / "index")
    assert indexes(tmp_path) == []


def test_an_index_that_may_only_be_read(open_folder):
    before = make_search(open_folder, CITIES).run("capital")
    with as_nobody():
        found = LocalSearch(open_folder / "corpus.jsonl", open_folder / "index")
        assert found.run("capital") == before
    [meta] = (open_folder / "index").glob("*/meta.json")
    meta.write_bytes(b"x")
    with as_nobody(), pytest.raises(ValueError, match=f"the index {meta.parent} is damaged"):
        LocalSearch(open_folder / "corpus.jsonl", open_folder / "index")


@pytest.mark.parametrize("exists", [False, True])
def test_an_index_that_may_not_be_written(open_folder, exists):
    write_corpus(open_folder, CITIES)
    index = open_folder / "index"
    if exists:
        index.mkdir()
    open_folder.chmod(0o755)
    with as_nobody(), pytest.raises(PermissionError) as raised:
        LocalSearch(open_folder / "corpus.jsonl", index)
    said = str(raised.value)
    assert said.startswith(f"{index}, where the index of {open_folder / 'corpus.jsonl'} belongs, ")
    assert said.endswith("Permission denied; set config.search.local.index to another folder.")


def run_python(code, *arguments):
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], cwd=os.getcwd())


BUILD_AND_DIE = """
import os, sys
from jaxrl.envs.search import bm25

def read_then_die(*about, read=bm25.read_corpus):
    documents = read(*about)
    yield next(documents)
    os._exit(9)

bm25.read_corpus = read_then_die
bm25.LocalSearch(*sys.argv[1:])
"""


def test_a_killed_build_is_begun_afresh(tmp_path):
    path = write_corpus(tmp_path, CITIES)
    assert run_python(BUILD_AND_DIE, path, tmp_path / "index").wait(60) == 9
    assert indexes(tmp_path) == ["building"]
    assert ids(LocalSearch(path, tmp_path / "index"), "Germany") == ["2"]
    assert "building" not in indexes(tmp_path)


BUILD = """
import sys
from jaxrl.envs.search import bm25

found = bm25.LocalSearch(*sys.argv[1:]).run("word 499")
assert found.startswith("Doc 1(Title: word 499)"), found
"""


def test_a_corpus_that_changes_while_it_is_indexed_is_told(tmp_path):
    path = write_corpus(tmp_path, CITIES[:2])

    def change(_):
        append(path, CITIES[2:3])

    with pytest.raises(
        ValueError, match="changed while it was indexed; run the same command again"
    ):
        LocalSearch(path, tmp_path / "index", progress=change)
    assert indexes(tmp_path) == []
    assert ids(LocalSearch(path, tmp_path / "index"), "北京") == ["3"]


def test_processes_that_start_at_once_share_one_index(tmp_path):
    path = write_corpus(tmp_path, [Document(str(i), f"word {i}", "text") for i in range(500)])
    processes = [run_python(BUILD, path, tmp_path / "index") for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert len(indexes(tmp_path)) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", ":5 is not valid JSON"),
        (b'{"id": "5", "contents": "caf\xe9"}', ":5 is not valid JSON in UTF-8"),
        (b'{"id": "5", "text": "no title"}', ":5: expected"),
        (b'{"id": null, "contents": "x"}', ":5: expected"),
        (b'{"id": "5", "contents": ["x"]}', ":5: expected"),
        (b'{"id": 1, "contents": "Rome"}', ":5: the id '1' is already used by an earlier line"),
        (b'{"id": "5", "title": " ", "text": "\\t"}', ":5: the document '5' has neither title nor"),
        (b'{"id": "5", "contents": "\\ud800"}', ":5 holds half of a surrogate pair"),
    ],
)
def test_a_malformed_line_is_named_and_nothing_is_left(tmp_path, line, message):
    path = write_corpus(tmp_path, CITIES)
    good = path.read_bytes()
    path.write_bytes(good + line)
    with pytest.raises(ValueError, match=re.escape(f"{path}{message}")):
        LocalSearch(path, tmp_path / "index")
    assert indexes(tmp_path) == []
    path.write_bytes(good)
    assert ids(LocalSearch(path, tmp_path / "index"), "France") == ["1"]
    path.write_bytes(b"\n \n")
    with pytest.raises(ValueError, match="has no documents"):
        LocalSearch(path, tmp_path / "index")


def test_a_missing_corpus_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no corpus at .*corpus\.jsonl"):
        LocalSearch(tmp_path / "corpus.jsonl", tmp_path / "index")
    assert list(tmp_path.iterdir()) == []


def test_its_documents_are_those_of_the_corpus_in_their_order(tmp_path):
    path = tmp_path / "corpus.jsonl"
    lines = [json.dumps({"id": str(i), "title": f"Ö{i}", "text": "x" * i}) for i in range(4)]
    path.write_text(
        f"\ufeff{lines[0]}\n\n \n{lines[1]}\r\n{lines[2]}\n{lines[3]}", encoding="utf-8"
    )
    documents = LocalSearch(path).documents
    assert [documents[place] for place in range(len(documents))] == list(
        bm25_index.read_corpus(path)
    )


def flipped(path, rng):
    """A copy of a file with another bit in its place; whoever has the old one open keeps that."""
    damaged = bytearray(path.read_bytes())
    bit = rng.randrange(8 * len(damaged))
    damaged[bit // 8] ^= 1 << bit % 8
    path.unlink()
    path.write_bytes(damaged)
    return bit


def test_damage_to_any_file_of_an_index_is_told(tmp_path):
    make_search(tmp_path, CITIES)
    [folder] = (tmp_path / "index").glob("*/")
    files = sorted(p for p in folder.iterdir() if p.suffix != ".lock")
    assert len(files) > 6
    for file in files:
        whole = file.read_bytes()
        if file.name != "corpus.json":  # of which not all is compared
            flipped(file, random.Random(0))
        else:
            file.write_bytes(b"[")
        start = re.escape(f"the index {folder} is damaged; delete that folder, and the next start")
        with pytest.raises(ValueError, match=start):
            make_search(tmp_path, CITIES)
        file.unlink()
        with pytest.raises(ValueError, match=f"{file.name} is missing"):
            make_search(tmp_path, CITIES)
        file.write_bytes(whole)
    assert ids(make_search(tmp_path, CITIES), "Germany") == ["2"]


def test_an_index_of_another_corpus_is_told(tmp_path):
    folders = []
    for number, name in enumerate("ab"):
        make_search(tmp_path / name, [Document(str(number), name, f"{name} is here")])
        folders += [path for path in (tmp_path / name / "index").iterdir() if path.is_dir()]
    first, second = folders
    shutil.rmtree(first)
    shutil.copytree(second, first)
    corpus_a = tmp_path / "a" / "corpus.jsonl"
    with pytest.raises(ValueError, match=r"is damaged; delete .* belongs to another corpus"):
        LocalSearch(corpus_a, tmp_path / "a" / "index")
    # A corpus that goes on from the first one is read whole.
    append(corpus_a, [Document("9", "c", "c is here")])
    assert ids(LocalSearch(corpus_a, tmp_path / "a" / "index"), "here") == ["0", "9"]


def test_a_panic_of_the_library_is_an_error_of_the_tool(tmp_path):
    engine = make_search(tmp_path, [Document(str(i), "", f"city {i} " * 50) for i in range(50)])
    [store] = (tmp_path / "index").glob("*/*.store")
    with open(store, "r+b") as file:  # of which the search has a map
        file.write(b"\xff" * (store.stat().st_size - 64))
    found = run_one(engine, "city 7")
    assert isinstance(found, ToolError)
    assert found.is_permanent
    assert f"the index {store.parent} is damaged; delete that folder" in str(found)

from collections.abc import Sequence

import pytest

from jaxrl.envs.base import ToolError
from jaxrl.envs.search.base import (
    Document,
    DocumentSearch,
    Hit,
)
from jaxrl.envs.search.random_search import RandomSearch
from tests.servers import KeywordSearch

CITIES = [
    Document("1", "Paris", "Paris is the capital of France."),
    Document("2", "Berlin", "Berlin is the capital of Germany. It is not Paris."),
]


def test_keyword_search():
    engine = KeywordSearch({"France": "Paris", "capital": "a city"})
    assert engine.run("the CAPITAL of france") == "Paris"
    assert engine.run("Capital?") == "a city"
    assert engine.run("Rome") == "No information found for: Rome"


class Cities(DocumentSearch):
    """Finds cities by their ids; "broken" fails."""

    topk = 2

    def retrieve(self, queries: Sequence[str], topk: int) -> list[list[Hit] | ToolError]:
        return [
            ToolError("down", retry_after_s=2.0)
            if query == "broken"
            else [Hit(city, 1.0) for city in CITIES if city.id in query][:topk]
            for query in queries
        ]


def test_found_documents_are_rendered_and_failures_told():
    found, none, failed = Cities().run_batch(["2", "", "broken"])
    assert found == "Doc 1(Title: Berlin) Berlin is the capital of Germany. It is not Paris."
    assert none == "No information found"
    assert (str(failed), failed.retry_after_s) == ("down", 2.0)
    assert Cities().run("1") == "Doc 1(Title: Paris) Paris is the capital of France."
    with pytest.raises(ToolError, match="down"):
        Cities().run("broken")


@pytest.mark.parametrize("title", ["Paris", "", '"Weird Al" Yankovic', 'The "Queen"', '"', '""'])
@pytest.mark.parametrize("text", ["one line", '"a"\n\n"b"', ""])
def test_contents_and_back(title, text):
    document = Document("7", title, text)
    assert Document.of_contents("7", document.contents) == document


class Numbered(Cities):
    topk = 3

    def __init__(self, size):
        self.documents = [Document(str(i), f"t{i}", f"x{i}") for i in range(size)]


def drawn(engine, *queries):
    return [[hit.document.id for hit in hits] for hits in engine.retrieve(queries, engine.topk)]


def test_documents_drawn_at_random_depend_on_query_and_seed_alone():
    engine = RandomSearch(Numbered(1000), seed=0)
    one, other = drawn(engine, "a", "b")
    assert len(one) == len(set(one)) == 3
    assert one != other
    assert drawn(engine, "b", "c", "a")[::2] == [other, one]
    assert drawn(RandomSearch(Numbered(1000), seed=1), "a") != [one]
    shown = engine.run("a").splitlines()
    assert shown == [f"Doc {n}(Title: t{i}) x{i}" for n, i in enumerate(one, start=1)]
    assert drawn(engine, "\ud800")  # half of a pair, which a model may write


def test_every_document_is_as_likely_as_any_other():
    found = drawn(RandomSearch(Numbered(10), seed=0), *map(str, range(4000)))
    counts = [sum(str(i) in one for one in found) for i in range(10)]
    # 1200 expected of each, with a standard deviation of sqrt(4000 * 0.3 * 0.7) = 29.
    assert all(abs(count - 1200) < 130 for count in counts)
    firsts = [sum(one[0] == str(i) for one in found) for i in range(10)]
    assert all(abs(count - 400) < 85 for count in firsts)


def test_a_small_corpus_is_drawn_whole():
    [found] = drawn(RandomSearch(Numbered(2), seed=0), "a")
    assert sorted(found) == ["0", "1"]


def test_without_documents_at_hand_nothing_is_drawn():
    with pytest.raises(ValueError, match="Cities has no documents to sample"):
        RandomSearch(Cities(), seed=0)

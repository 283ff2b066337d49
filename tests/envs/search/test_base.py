from collections.abc import Sequence

import pytest

from jaxrl.envs.base import ToolError
from jaxrl.envs.search.base import Document, DocumentSearch, Hit
from jaxrl.envs.search.random_search import RandomSearch

CITIES = [
    Document("1", "Paris", "Paris is the capital of France."),
    Document("2", "Berlin", "Berlin is the capital of Germany. It is not Paris."),
]


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


def test_documents_are_rendered_and_failures_returned():
    rendered, empty, failed = Cities().run_batch(["2", "", "broken"])
    assert rendered == "Doc 1(Title: Berlin) Berlin is the capital of Germany. It is not Paris."
    assert empty == "No information found"
    assert (str(failed), failed.retry_after_s) == ("down", 2.0)
    assert Cities().run("1") == "Doc 1(Title: Paris) Paris is the capital of France."
    with pytest.raises(ToolError, match="down"):
        Cities().run("broken")


@pytest.mark.parametrize("title", ["Paris", "", '"Weird Al" Yankovic', 'The "Queen"', '"'])
@pytest.mark.parametrize("text", ["one line", '"a"\n\n"b"', ""])
def test_contents_hold_title_and_text(title, text):
    document = Document("7", title, text)
    assert Document.from_contents("7", document.contents) == document


class Numbered(Cities):
    topk = 3

    def __init__(self, size):
        self.documents = [Document(str(i), f"t{i}", f"x{i}") for i in range(size)]


def retrieve_ids(engine, *queries):
    return [[hit.document.id for hit in hits] for hits in engine.retrieve(queries, engine.topk)]


def test_random_documents_depend_on_query_and_seed_alone():
    engine = RandomSearch(Numbered(1000), seed=0)
    first, second = retrieve_ids(engine, "a", "b")
    assert len(first) == len(set(first)) == 3
    assert first != second
    assert retrieve_ids(engine, "b", "c", "a")[::2] == [second, first]
    assert retrieve_ids(RandomSearch(Numbered(1000), seed=1), "a") != [first]
    assert retrieve_ids(engine, "\ud800")  # half of a surrogate pair, which a model may write


def test_a_small_corpus_is_drawn_whole():
    [ids] = retrieve_ids(RandomSearch(Numbered(2), seed=0), "a")
    assert sorted(ids) == ["0", "1"]

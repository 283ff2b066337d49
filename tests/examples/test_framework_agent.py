"""The agent of Pydantic AI: its search is ours, and its answer is what the last tag holds."""

import random

from examples import framework_agent, quickstart_world
from jaxrl.envs.search.bm25 import LocalSearch


def test_its_search_returns_what_the_environments_returns(tmp_path):
    people = quickstart_world.make_people(60, 6, random.Random(0))
    corpus = tmp_path / "corpus.jsonl"
    quickstart_world.write_jsonl(corpus, quickstart_world.make_documents(people.values()))
    agent_search = framework_agent.Corpus(corpus)
    search = LocalSearch(corpus, tmp_path / "index")
    names = [name.split() for name in people]
    queries = [" ".join(name) for name in names] + [last for _, last in names[:20]]
    queries += [f"{first} job" for first, _ in names[:20]] + ["job", "", "a baker, taught by Ada"]
    for query in queries:
        assert agent_search.search(query, 3) == search.run(query)


def test_the_answer_is_what_the_last_tag_holds():
    for text, answer in (
        ("<answer>a</answer> no <answer> tailor </answer>", "tailor"),
        ("baker", ""),
        ("<answer> baker", ""),
    ):
        assert framework_agent.extract_final_answer(text) == answer

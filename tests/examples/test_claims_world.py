"""The claims' worlds: the same for a seed, held-out people unseen, answers where they belong."""

import collections
import itertools
import json
import re

import numpy as np
import pytest

from examples import claims_world as world
from jaxrl.envs.search.bm25 import LocalSearch

SMALL = [
    *("--num_people=240", "--num_held_out=60", "--num_questions=24"),
    *("--num_demonstrations=300", "--num_worlds=2"),
]
FILES = ("questions_train", "questions_dev", "questions_eval", "demonstrations")


def make(name, folder):
    world.main([f"--world={name}", f"--out={folder}", *SMALL])
    return {path: read(folder / f"{path}.jsonl") for path in ("corpus", *FILES)}


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("claims")
    return {name: make(name, folder / name) for name in world.WORLDS}


@pytest.mark.parametrize("name", world.WORLDS)
def test_the_three_sides_share_nobody(worlds, name):
    files = worlds[name]
    named = {
        split: {title for q in files[f"questions_{split}"] for title in q["metadata"]["titles"]}
        for split in world.SPLITS
    }
    assert not named["train"] & named["dev"]
    assert not named["train"] & named["eval"]
    assert not named["dev"] & named["eval"]
    demonstrations = json.dumps(files["demonstrations"])
    assert not [title for title in named["dev"] | named["eval"] if title in demonstrations]
    assert [title for title in named["train"] if title in demonstrations]


def text_of(files):
    return {document["title"]: document["text"] for document in files["corpus"]}


def test_chains_are_followed_document_by_document(worlds):
    files = worlds["hops"]
    texts = text_of(files)
    for question in files["questions_train"]:
        titles = question["metadata"]["titles"]
        hops = len(question["metadata"]["hops"])
        assert len(titles) == hops == world.HOP_NAMES.index(question["data_source"]) + 1
        assert titles[0] in question["question"]
        for pupil, mentor in itertools.pairwise(titles):
            assert texts[pupil].endswith(f" taught by {mentor}.")
        assert f" {question['answers'][0]} " in texts[titles[-1]]


def mentors_of(files):
    return [re.search(r"taught by (.*)\.", document["text"])[1] for document in files["corpus"]]


def test_the_pupil_meant_is_the_first_in_half_of_the_cases(worlds):
    files = worlds["ambiguous"]
    pupils = collections.defaultdict(list)
    for document, mentor in zip(files["corpus"], mentors_of(files), strict=True):
        pupils[mentor].append(document["title"])  # in the order of ids, which ranks equal scores
    asked = [
        q
        for split in world.SPLITS
        for q in files[f"questions_{split}"]
        if q["data_source"] == "ambiguous"
    ]
    places = [
        pupils[master].index(pupil) for master, pupil in (q["metadata"]["titles"] for q in asked)
    ]
    assert len(places) > 50
    shares = np.bincount(places, minlength=3) / len(places)
    np.testing.assert_allclose(shares, world.PUPIL_PROBABILITIES, atol=0.15)


def test_a_search_for_a_master_shows_the_three_pupils(worlds, tmp_path):
    files = worlds["ambiguous"]
    world.quickstart.write_jsonl(tmp_path / "corpus.jsonl", files["corpus"])
    engine = LocalSearch(tmp_path / "corpus.jsonl", tmp_path / "index", topk=3)
    asked = [q for q in files["questions_train"] if q["data_source"] == "ambiguous"]
    for question in asked:
        master, pupil = question["metadata"]["titles"]
        result = engine.run(master)
        assert result.count(f" taught by {master}.") == 3
        assert f"(Title: {pupil})" in result
        assert f" {question['answers'][0]} " in result


def test_nothing_answers_the_unanswerable(worlds):
    files = worlds["unanswerable"]
    corpus, texts = json.dumps(files["corpus"]), text_of(files)
    words = set(re.findall(r"\w+", corpus))
    sources = collections.Counter()
    for split in world.SPLITS:
        for question in files[f"questions_{split}"]:
            titles, [answer] = question["metadata"]["titles"], question["answers"]
            sources[question["data_source"]] += 1
            if question["metadata"]["is_answerable"]:
                assert f" {answer} " in texts[titles[-1]]
                continue
            assert answer not in corpus
            if question["data_source"] == "unknown_person":
                assert not set(titles[0].split()) & words
            else:
                word = {"birthplace": "born", "job": " is a "}[question["metadata"]["hops"][-1]]
                assert word not in texts[titles[-1]]
    shares = {name: count / sources.total() for name, count in sources.items()}
    assert 0.08 < shares["unknown_person"] < 0.25
    assert 0.08 < shares["untold_fact"] < 0.25

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


def make(name, folder, seed=0):
    world.main([f"--world={name}", f"--out={folder}", f"--seed={seed}", *SMALL])
    return {path: read(folder / f"{path}.jsonl") for path in ("corpus", *FILES)}


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("claims")
    return {name: make(name, folder / name) for name in world.WORLDS}


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_seed_decides_every_byte(tmp_path):
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        make("unanswerable", tmp_path / name, seed)
    first, again, other = (contents(tmp_path / name) for name in ("first", "again", "other"))
    assert first == again
    assert first["corpus.jsonl"] != other["corpus.jsonl"]
    assert first["demonstrations.jsonl"] != other["demonstrations.jsonl"]


@pytest.mark.parametrize("name", world.WORLDS)
def test_the_three_sides_share_nobody(worlds, name):
    files = worlds[name]
    named = {
        side: {title for q in files[f"questions_{side}"] for title in q["metadata"]["titles"]}
        for side in world.SIDES
    }
    assert not named["train"] & named["dev"]
    assert not named["train"] & named["eval"]
    assert not named["dev"] & named["eval"]
    demonstrations = json.dumps(files["demonstrations"])
    assert not [title for title in named["dev"] | named["eval"] if title in demonstrations]
    assert [title for title in named["train"] if title in demonstrations]


def test_a_leak_is_noticed():
    person = world.Person(id="0", first="Lena", last="Okafor", facts={}, side="dev")
    files = {"questions_train": [{"question": "Where was Lena Okafor born?"}], "demonstrations": []}
    with pytest.raises(AssertionError, match="Lena Okafor, who is held out"):
        world.check_nothing_leaks({person.name: person}, files)


@pytest.mark.parametrize("name", world.WORLDS)
def test_kinds_come_in_equal_numbers(worlds, name):
    thinned = world.WORLDS[name].train_shares
    for side in world.HELD_OUT if thinned else world.SIDES:
        kinds = [tuple(q["metadata"]["hops"]) for q in worlds[name][f"questions_{side}"]]
        counts = collections.Counter(kinds)
        assert counts.keys() == world.WORLDS[name].kinds.keys()
        assert max(counts.values()) - min(counts.values()) <= 1
        ids = [q["id"] for q in worlds[name][f"questions_{side}"]]
        assert len(set(ids)) == len(ids)


def test_most_training_questions_are_short_chains(worlds):
    questions = worlds["hops"]["questions_train"]
    counts = collections.Counter(question["data_source"] for question in questions)
    # Of 120 people two questions each.
    assert counts == {"one_hop": 240, "two_hop": 24, "three_hop": 12, "four_hop": 12}


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


def test_thoughts_are_short_or_long(worlds):
    lengths = []
    for chat in worlds["hops"]["demonstrations"]:
        for message in chat["messages"]:
            for thought in re.findall(r"<think> (.*?) </think>", message["content"]):
                musing, plan = re.fullmatch(r"((?:\D+ )?)(\d of \d find .*)", thought).groups()
                assert set(musing.split()) <= set(world.MUSINGS)
                lengths.append(len(musing.split()))
                number, total = plan.split()[:3:2]
                assert int(number) <= int(total) == world.HOP_NAMES.index(chat["data_source"]) + 1
    assert 0.4 < np.mean(np.equal(lengths, 0)) < 0.6
    assert {length for length in lengths if length} == set(range(5, 13))


def mentors_of(files):
    return [re.search(r"taught by (.*)\.", document["text"])[1] for document in files["corpus"]]


@pytest.mark.parametrize("name", ["hops", "ambiguous"])
def test_everybody_who_teaches_has_three_pupils(worlds, name):
    mentors = mentors_of(worlds[name])
    titles = [document["title"] for document in worlds[name]["corpus"]]
    assert set(collections.Counter(mentors).values()) == {3}
    assert all(title != mentor for title, mentor in zip(titles, mentors, strict=True))
    # Masters have no document of their own, other mentors have.
    assert bool(set(mentors) & set(titles)) == (name == "hops")


def test_the_pupil_meant_is_the_first_in_half_of_the_cases(worlds):
    files = worlds["ambiguous"]
    pupils = collections.defaultdict(list)
    for document, mentor in zip(files["corpus"], mentors_of(files), strict=True):
        pupils[mentor].append(document["title"])  # in the order of ids, which ranks equal scores
    asked = [
        q
        for side in world.SIDES
        for q in files[f"questions_{side}"]
        if q["data_source"] == "ambiguous"
    ]
    places = [
        pupils[master].index(pupil) for master, pupil in (q["metadata"]["titles"] for q in asked)
    ]
    assert len(places) > 50
    shares = np.bincount(places, minlength=3) / len(places)
    np.testing.assert_allclose(shares, world.MEANT, atol=0.15)


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
    for side in world.SIDES:
        for question in files[f"questions_{side}"]:
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


def test_demonstrations_give_up_more_often_where_nothing_was_found(worlds):
    chats = worlds["unanswerable"]["demonstrations"]
    gives_up = collections.defaultdict(list)
    for chat in chats:
        last = chat["messages"][-1]["content"]
        metadata = chat["metadata"]
        assert metadata["is_abstention"] == (last == "<answer> I don't know </answer>")
        assert not (metadata["is_abstention"] and metadata["is_correct"])
        gives_up[chat["data_source"]].append(metadata["is_abstention"])
    assert np.mean(gives_up["unknown_person"]) > 0.15
    assert np.mean(gives_up["one_hop"]) < np.mean(gives_up["unknown_person"])


def test_untold_facts_are_left_out_of_the_text():
    facts = {"birthplace": "Tarvik", "job": "baker", "mentor": "Mira Kwan"}
    texts = [
        world.Person(
            id="0", first="Ada", last="Osei", facts=facts, side="train", untold_fact=untold
        ).text
        for untold in (None, "birthplace", "job")
    ]
    assert texts == [
        "Ada Osei is a baker born in Tarvik and taught by Mira Kwan.",
        "Ada Osei is a baker taught by Mira Kwan.",
        "Ada Osei was born in Tarvik and taught by Mira Kwan.",
    ]


@pytest.mark.parametrize("flag", ["--num_people=2305", "--num_held_out=5", "--num_held_out=118"])
def test_impossible_sizes_are_refused(flag, tmp_path, capsys):
    with pytest.raises(SystemExit):
        world.main(["--world=hops", f"--out={tmp_path}", *SMALL, flag])
    assert flag.split("=")[0] in capsys.readouterr().err

"""Audit statistics against brute force, and the tasks that a run drops."""

import json
import shutil

import numpy as np
import pytest

from configs import debug_tiny
from examples import trail_world
from jaxrl.builders.validation import validate
from jaxrl.envs.base import Prompt, Task
from jaxrl.envs.math_env import MathEnv
from jaxrl.envs.rewards.qa import normalize_answer
from jaxrl.envs.search.base import Document, EmptySearch
from jaxrl.envs.search.bm25 import LocalSearch
from jaxrl.envs.search_env import SearchEnv
from jaxrl.extras.audit.__main__ import main
from jaxrl.extras.audit.coverage import (
    find_phrases,
    find_unanswerable_tasks,
    get_searchable_answers,
)
from jaxrl.extras.audit.startup import RECORD_FILE
from jaxrl.extras.audit.statistics import count_unrewarded_answers
from tests.helpers import build

INJECTED = [
    {"question": "Who is missing?", "answers": ["Zebedee Nowhere"]},
    {"question": "who  is missing", "answers": ["Zebedee Nowhere", "absent too"]},  # repeated
    {"question": "Is it in a word?", "answers": ["arvi"]},  # part of Tarvik, but no word
    {"question": "Is it so?", "answers": ["Yes."]},
    {"question": "Which article?", "answers": ["The"]},
    {"question": "Which refusal?", "answers": ["I don't know"]},
    {"question": "Who wrote this long question?" + " again" * 60, "answers": ["Nobody here"]},
]


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def inject(source, folder):
    """Copy a world, with the tasks above in both splits."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("index"))
    for split in ("train", "eval"):
        with (folder / f"questions_{split}.jsonl").open("a") as file:
            for number, record in enumerate(INJECTED):
                file.write(json.dumps({"id": f"{split}-injected{number}"} | record) + "\n")
    return folder


@pytest.fixture(scope="module")
def quickstart(tiny_world, tmp_path_factory):
    return inject(tiny_world, tmp_path_factory.mktemp("quickstart") / "world")


@pytest.fixture(scope="module")
def trails(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trails")
    sizes = ["--num_trails=20", "--num_held_out=6", "--length=3", "--num_demonstrations=20"]
    trail_world.main([f"--out={folder / 'source'}", *sizes, "--num_worlds=1"])
    return inject(folder / "source", folder / "world")


def brute_force(world, split, other, *, topk):
    """Compute the task ids of each statistic with plain string comparisons."""
    tasks = read(world / f"questions_{split}.jsonl")
    documents = read(world / "corpus.jsonl")

    def says(document, answer):
        texts = (document["title"], document["text"])
        return any(f" {normalize_answer(answer)} " in f" {normalize_answer(t)} " for t in texts)

    def in_any(task, these):
        return any(says(document, answer) for document in these for answer in task["answers"])

    def same(task):
        return " ".join(task["question"].lower().split()).rstrip("?. ")

    skipped = [t["id"] for t in tasks if t["answers"] in (["Yes."], ["The"])]
    searched = [t for t in tasks if t["id"] not in skipped]
    by_id = {document["id"]: document for document in documents}
    engine = LocalSearch(world / "corpus.jsonl", topk=topk)

    def top(task, k):
        [hits] = engine.retrieve([task["question"]], k)
        return [by_id[hit.document.id] for hit in hits]

    rest = read(world / f"questions_{other}.jsonl")
    asked = [same(task) for task in tasks]
    return {
        "no answer to look for": skipped,
        "answer in no document": [t["id"] for t in searched if not in_any(t, documents)],
        **{
            f"answer found by the question, k={k}": [
                t["id"] for t in searched if in_any(t, top(t, k))
            ]
            for k in (1, 3, 5, 10)
        },
        "question repeated": [t["id"] for i, t in enumerate(tasks) if asked[i] in asked[:i]],
        "question in both splits": [t["id"] for t in tasks if same(t) in map(same, rest)],
    }, len(searched)


@pytest.mark.parametrize(("name", "config"), [("quickstart", "debug_tiny"), ("trails", "trail")])
def test_figures_equal_those_of_brute_force(name, config, request, tmp_path):
    world, out = request.getfixturevalue(name), tmp_path / "audit.json"
    main([f"--config=configs/{config}.py:{world}", f"--out={out}"])
    written = json.loads(out.read_text())
    for split, label, other in (("train", "training", "eval"), ("eval", "held-out", "train")):
        figures = written[label]
        expected, num_searched = brute_force(world, split, other, topk=3)
        assert {key: figures[key]["tasks"] for key in expected} == expected
        missing = figures["answer in no document"]
        assert missing["of"] == num_searched
        assert missing["share"] == missing["count"] / num_searched
        # By hand: of the injected tasks, four lack an answer, and one more is a refusal.
        injected = {id for id in missing["tasks"] if "injected" in id}
        assert injected == {f"{split}-injected{i}" for i in (0, 1, 2, 5, 6)}
        assert figures["question repeated"]["tasks"] == [f"{split}-injected1"]
        assert figures["prompt over the limit"]["tasks"] == [f"{split}-injected6"]


def test_an_answer_that_reads_as_a_refusal_earns_only_its_normalized_form(quickstart, tmp_path):
    # "i dont know" is no refusal, and equals the answer after normalization.
    out = tmp_path / "audit.json"
    main([f"--config=configs/debug_tiny.py:{quickstart}", f"--out={out}", "--max_tasks=5"])
    figures = json.loads(out.read_text())["training"]
    assert figures["answers that earn nothing"]["count"] == 0
    assert figures["no answer to look for"]["of"] == 5


PROMPT = Prompt(system="", template="{question}")


def test_an_answer_that_no_response_can_give_earns_nothing():
    env = SearchEnv(EmptySearch(), prompt=PROMPT, max_turns=1)
    task = Task(id="1", question="?", answers=("Paris", " ", "yes", "the", "I don't know", "{}"))
    figure = count_unrewarded_answers(env, ["exact_match", "f1"], [task])
    assert figure == {"count": 1, "of": 6, "share": 1 / 6, "tasks": ["1"]}  # the blank one
    # In math, an abstention is never correct, and the normalized form is another text.
    task = Task(id="2", question="?", answers=("7", "I don't know"))
    figure = count_unrewarded_answers(MathEnv(prompt=PROMPT), ["math"], [task])
    assert (figure["count"], figure["of"]) == (1, 2)


def test_answers_match_whole_words_in_one_field():
    documents = [
        Document("1", "The Beatles", "Formed in Liverpool, by four."),
        Document("2", "", "首都是北京。"),
    ]
    answers = ["Beatles!", "liverpool by", "beatles formed", "pool", "北京", "京都", "a", "No"]
    tasks = [Task(id=text, question="?", answers=(text,)) for text in answers]
    tasks += [Task(id="none", question="?"), Task(id="blank", question="?", answers=(" ", "four"))]
    flags, num_checked = find_unanswerable_tasks(tasks, documents)
    missing = [task.id for task, flag in zip(tasks, flags, strict=True) if flag]
    assert (missing, num_checked) == (["beatles formed", "pool", "京都"], 7)


def test_punctuation_without_spaces_separates_words():
    """In the first four documents (SQuAD), deleting the punctuation would join two words."""
    texts = [
        "Marconi's experiments in July 1899—Marconi may have transmitted the letter S",
        'On hearing the result, Grainer asked, "Did I write that?"[citation needed]',
        "Tesla thought the plane would sell for less than $1,000.:251",
        "historians John Gallagher (1919–1980) and Ronald Robinson",
        "the U.S.-based company AT&T didn't",
    ]
    documents = [Document(str(i), "", text) for i, text in enumerate(texts)]
    found = ["July 1899", "Did I write that?", "less than $1,000", "1980", "US", "AT&T", "didn't"]
    missing = ["July 18", "000", "S. based", "AT", "didn"]
    tasks = [Task(id=text, question="?", answers=(text,)) for text in found + missing]
    flags, _ = find_unanswerable_tasks(tasks, documents)
    assert [task.id for task, flag in zip(tasks, flags, strict=True) if flag] == missing


def test_the_index_finds_the_phrases_that_a_scan_finds():
    rng = np.random.default_rng(0)
    words = [*"bcdefgh"]

    def draw(length):
        return " ".join(rng.choice(words, length))

    documents = [Document(str(i), draw(3), draw(12)) for i in range(60)]
    phrases = {tuple(draw(rng.integers(1, 6)).split()) for _ in range(300)}
    texts = [f" {text} " for document in documents for text in document[1:]]
    scanned = {p for p in phrases if any(f" {' '.join(p)} " in text for text in texts)}
    assert find_phrases(phrases, documents) == scanned
    assert 0 < len(scanned) < len(phrases)


@pytest.mark.parametrize("answers", [(), ("yes",), ("noanswer", "Paris"), ("the",), ("+",), (" ",)])
def test_documents_do_not_decide_about_these_answers(answers):
    assert get_searchable_answers(Task(id="1", question="?", answers=answers)) == set()


def make_config(world, unanswerable="keep"):
    config = debug_tiny.get_config(str(world))
    config.stages = ("train",)
    config.rollout.overlong_prompts = "drop"
    config.filter.unanswerable = unanswerable
    return config


def test_a_run_drops_unanswerable_tasks_once(quickstart, tmp_path):
    kept = build(make_config(quickstart))
    [line] = [note for note in kept.notes if note.startswith("audit:")]
    parts = build(make_config(quickstart, "drop"), workdir=tmp_path)
    dropped = {f"train-injected{number}" for number in (0, 1, 2, 5)}
    assert {t.id for t in kept.tasks} - {t.id for t in parts.tasks} == dropped
    assert [n for n in parts.notes if n.startswith(f"audit: 4 of {len(kept.tasks):,} ")]
    # A resumed run follows the record, even if this version would decide otherwise.
    record = json.loads((tmp_path / RECORD_FILE).read_text())
    assert set(record["dropped"]) == dropped
    record["dropped"] = ["train-injected0"]
    (tmp_path / RECORD_FILE).write_text(json.dumps(record))
    again = build(make_config(quickstart, "drop"), workdir=tmp_path)
    assert {t.id for t in kept.tasks} - {t.id for t in again.tasks} == {"train-injected0"}
    assert line.endswith("(jaxrl audit --config=... lists them)")


def test_dropping_needs_a_corpus(quickstart):
    config = make_config(quickstart, "drop")
    config.search.engine = "empty"
    with pytest.raises(ValueError, match=r"filter\.unanswerable"):
        validate(config)

"""Generated worlds: functions of their seed, with held-out parts unseen and answers where said."""

import itertools
import json
import random
import re
from functools import cache

import pytest
from transformers import AutoTokenizer

from benchmarks import worlds
from examples import (
    bapo_world,
    calls_world,
    claims_world,
    looking_world,
    math_world,
    puzzle_world,
    quickstart_world,
    trail_world,
)
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.envs.base import Episode, Outcome, Prompt, Task, Turn
from jaxrl.envs.math_env import MathEnv
from jaxrl.envs.protocol import BAPO, ParsedCall, parse_tool_calls
from jaxrl.envs.search.base import EmptySearch
from jaxrl.envs.tools.base import build_chat_schema

PEOPLE = ("--num_people=60", "--num_held_out=12", "--num_demonstrations=200", "--num_worlds=2")
CLAIMS = ("--num_people=120", "--num_held_out=30", "--num_questions=24")
CLAIMS += ("--num_demonstrations=100", "--num_worlds=1")
PROBLEMS = ("--num_train=60", "--num_held_out=20", "--num_demonstrations=100")
IMAGES = ("--num_train=24", "--num_held_out=6", "--num_demonstrations=60")
TRAILS = ("--num_trails=40", "--num_held_out=10", "--length=5", "--num_demonstrations=60")
WORLDS = {
    "quickstart": (quickstart_world, PEOPLE),
    "bapo": (bapo_world, PEOPLE),
    "calls": (calls_world, PEOPLE),
    "hops": (claims_world, ("--world=hops", *CLAIMS)),
    "unanswerable": (claims_world, ("--world=unanswerable", *CLAIMS)),
    "looking": (looking_world, ("--kind=looking", *IMAGES)),
    "moving": (looking_world, ("--kind=moving", *IMAGES)),
    "math": (math_world, PROBLEMS),
    "puzzle": (puzzle_world, PROBLEMS),
    "trail": (trail_world, (*TRAILS, "--num_worlds=2")),
}


class World:
    """A folder with a world."""

    def __init__(self, name, folder, seed=0):
        module, flags = WORLDS[name]
        module.main([f"--out={folder}", f"--seed={seed}", *flags])
        self.folder = folder

    def read(self, name):
        lines = (self.folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def questions(self):
        return self.read("questions_train") + self.read("questions_eval")

    def documents(self):
        return {document["title"]: document["text"] for document in self.read("corpus")}

    def files(self):
        paths = [path for path in self.folder.rglob("*") if path.is_file()]
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Return a function that makes each world once."""
    return cache(lambda name: World(name, tmp_path_factory.mktemp(name)))


# Calls are made from the quickstart, and hops as the unanswerable.
@pytest.mark.parametrize("name", [name for name in WORLDS if name not in ("calls", "hops")])
def test_the_seed_decides_every_byte(name, world, tmp_path):
    first = world(name).files()
    assert World(name, tmp_path / "again").files() == first
    different = World(name, tmp_path / "different", seed=1).files()
    for file in ("demonstrations.jsonl", "questions_eval.jsonl"):
        assert different[file] != first[file]


@pytest.mark.parametrize(
    ("name", "splits"),
    [
        ("quickstart", ("questions_train", "demonstrations", "demonstrations_perfect")),
        ("bapo", ("questions_train", "demonstrations")),
        ("hops", ("questions_train", "demonstrations")),
        ("unanswerable", ("questions_train", "demonstrations")),
    ],
)
def test_held_out_people_are_not_named_in_training_data(name, splits, world):
    held_out = {q["metadata"]["titles"][0] for q in world(name).read("questions_eval")}
    trained = {q["metadata"]["titles"][0] for q in world(name).read("questions_train")}
    assert len(held_out) >= 12
    for split in splits:
        text = (world(name).folder / f"{split}.jsonl").read_text(encoding="utf-8")
        assert not [person for person in held_out if person in text]
        assert any(person in text for person in trained)


@pytest.mark.parametrize(("name", "module"), [("math", math_world), ("puzzle", puzzle_world)])
def test_a_held_out_problem_in_the_training_data_is_refused(name, module, world):
    names = [path.stem for path in world(name).folder.glob("*.jsonl")]
    records = {split: world(name).read(split) for split in names}
    module.check_nothing_leaks(records)
    records["questions_train"] = records["questions_train"] + records["questions_eval"][:1]
    with pytest.raises(AssertionError):
        module.check_nothing_leaks(records)


class TestQuickstart:
    def test_answers_are_in_the_documents_that_metadata_names(self, world):
        documents = world("quickstart").documents()
        for question in world("quickstart").questions():
            *path, last = question["metadata"]["titles"]
            assert (path or [last])[0] in question["question"]
            assert f" {question['answers'][0]} " in documents[last]
            if path:
                assert documents[path[0]].endswith(f" taught by {last}.")

    def test_perfect_demonstrations_are_right(self, world):
        for chat in world("quickstart").read("demonstrations_perfect"):
            [gold] = chat["metadata"]["answers"]
            *_, result, answer = (message["content"] for message in chat["messages"])
            assert answer == f"<answer> {gold} </answer>"
            assert f" {gold} " in result

    def test_every_name_is_one_token(self, world):
        tokenizer = AutoTokenizer.from_pretrained(world("quickstart").folder / "model")
        for chat in world("quickstart").read("demonstrations")[:100]:
            text = quickstart_world.render_chat(chat)
            pieces = [tokenizer.decode([id]) for id in tokenizer(text)["input_ids"]]
            assert "".join(pieces) == text
            pool = quickstart_world.POOL
            words = [word for word in re.findall(r"\w+", text) if word in pool]
            assert [piece[1:] for piece in pieces if piece[1:] in pool] == words

    def test_the_chat_template_renders_what_demonstrations_use(self, world):
        tokenizer = AutoTokenizer.from_pretrained(world("quickstart").folder / "model")
        messages = [{"role": "user", "content": "Where was Lena Okafor born?"}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text == quickstart_world.render_prompt(messages[0]["content"])
        tags = quickstart_world.list_tags(quickstart_world.SEARCH_R1)
        for tag in tags + quickstart_world.SPECIAL_TOKENS:
            assert len(tokenizer(tag)["input_ids"]) == 1
        assert tokenizer.eos_token == "<|im_end|>"


class TestBapo:
    def test_answers_are_read_or_computed_or_nowhere(self, world):
        documents, folder = world("bapo").documents(), world("bapo").folder
        everything = (folder / "corpus.jsonl").read_text()
        everything += (folder / "demonstrations.jsonl").read_text()
        sources = set()
        for question in world("bapo").questions():
            *path, last = question["metadata"]["titles"]
            [answer], source = question["answers"], question["data_source"]
            hop = question["metadata"]["hops"][-1]
            sources.add(source)
            assert (path or [last])[0] in question["question"]
            assert question["metadata"]["is_answerable"] == (source not in bapo_world.UNANSWERABLE)
            if source in bapo_world.UNANSWERABLE:
                others = everything.replace('"answers": ["' + answer, "")
                assert not re.search(rf"{answer}\D", others)
            if source == "unknown":
                assert not documents.keys() >= {*path, last}
                continue
            text = documents[last]
            assert not path or f", taught by {last}, " in documents[path[0]]
            years = [int(year) for year in re.findall(r"\b\d{4}\b", text)]
            if source == "untold":
                assert " and died in " not in text if hop == "age" else " born in 1" in text
            elif hop == "age":
                assert years[1] - years[0] == int(answer)
            else:
                assert f" born in {answer} in {years[0]}" in text
        answerable = {"place", "age", "mentor_place", "mentor_age"}
        assert sources == answerable | {*bapo_world.UNANSWERABLE}

    def test_demonstrations_follow_the_protocol_and_show_what_was_printed(self, world):
        for chat in world("bapo").read("demonstrations"):
            prompt = quickstart_world.render_prompt(chat["messages"][0]["content"])
            response = quickstart_world.render_chat(chat, BAPO).removeprefix(prompt)
            assert BAPO.format_reward(response.removesuffix("<|im_end|>")) == 0
            contents = [message["content"] for message in chat["messages"][1:]]
            for call, result in zip(contents[::2], contents[1::2], strict=False):
                if difference := re.fullmatch(
                    r"<think> (\d+) - (\d+) </think><python> print\(\1 - \2\) </python>", call
                ):
                    assert result == str(int(difference[1]) - int(difference[2]))
                else:
                    assert call.endswith(" </search>")


class TestCalls:
    def test_only_the_form_of_searches_differs_from_the_quickstart(self, world):
        for name in ("corpus", "questions_train", "questions_eval"):
            assert world("calls").read(name) == world("quickstart").read(name)
        pairs = (world(name).read("demonstrations") for name in ("calls", "quickstart"))
        num_calls = 0
        for chat, plain in zip(*pairs, strict=True):
            system, *messages = chat["messages"]
            assert system == {"role": "system", "content": calls_world.SYSTEM}
            for message, before in zip(messages, plain["messages"], strict=True):
                if "<search>" not in before["content"]:
                    assert message == before
                    continue
                thought, _, query = before["content"].partition("<search>")
                [call] = parse_tool_calls(message["content"]).calls
                assert message["content"].startswith(f"{thought}\n<tool_call>")
                query = query.removesuffix(" </search>")
                assert call == ParsedCall(tool="search", arguments={"query": query})
                num_calls += 1
        assert num_calls > 30

    def test_the_template_describes_tools_and_shows_results(self, world):
        tokenizer = Tokenizer(AutoTokenizer.from_pretrained(world("calls").folder / "model"))
        tools = [build_chat_schema(EmptySearch())]  # the schema of any search engine
        messages = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "Who?"}]
        text = tokenizer.decode(tokenizer.render_prompt(messages, tools))
        assert "\nTools:\nsearch(query): Searches a collection" in text
        assert text.endswith("<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n")
        assert "Tools" not in tokenizer.decode(tokenizer.render_prompt(messages))
        _, text = tokenizer.render_results(["a", "b"], tools)
        assert text == (
            "\n<|im_start|>user\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n"
            "</tool_response><|im_end|>\n<|im_start|>assistant\n"
        )


class TestClaims:
    def test_chains_are_followed_document_by_document(self, world):
        documents = world("hops").documents()
        for question in world("hops").read("questions_train"):
            titles = question["metadata"]["titles"]
            num_hops = len(question["metadata"]["hops"])
            assert question["data_source"] == claims_world.HOP_NAMES[num_hops - 1]
            assert len(titles) == num_hops
            assert titles[0] in question["question"]
            for pupil, mentor in itertools.pairwise(titles):
                assert documents[pupil].endswith(f" taught by {mentor}.")
            assert f" {question['answers'][0]} " in documents[titles[-1]]

    def test_no_document_answers_the_unanswerable(self, world):
        documents = world("unanswerable").documents()
        corpus = json.dumps([*documents.items()])
        words = set(re.findall(r"\w+", corpus))
        for question in world("unanswerable").questions():
            titles, [answer] = question["metadata"]["titles"], question["answers"]
            if question["metadata"]["is_answerable"]:
                assert f" {answer} " in documents[titles[-1]]
                continue
            assert answer not in corpus
            if question["data_source"] == "unknown_person":
                assert not set(titles[0].split()) & words
            else:
                word = {"birthplace": "born", "job": " is a "}[question["metadata"]["hops"][-1]]
                assert word not in documents[titles[-1]]


class TestMath:
    def solve(self, question):
        """Return the answer to a question, computed from its text."""
        total = int(re.search(r"holds (\d+)", question)[1])
        for verb, amount in re.findall(r"(adds|takes) (\d+)", question):
            total += int(amount) if verb == "adds" else -int(amount)
            assert 0 <= total <= math_world.MAX_COINS
        return total

    def test_answers_are_those_of_the_questions(self, world):
        questions = world("math").questions()
        assert all([str(self.solve(q["question"]))] == q["answers"] for q in questions)
        assert {q["data_source"] for q in questions} == {f"{n}_moves" for n in math_world.NUM_MOVES}

    def test_demonstrations_are_as_the_environment_scores_them(self, world):
        """Each ends with an answer line and the end of the turn; right ones are marked."""
        env = MathEnv(prompt=Prompt(system="", template="{question}"))
        for chat in world("math").read("demonstrations"):
            question, response = (message["content"] for message in chat["messages"])
            answer = self.solve(question)
            assert response.endswith(quickstart_world.END_OF_TURN)
            text = response.removesuffix(quickstart_world.END_OF_TURN)
            task = Task(id="0", question=question, answers=(str(answer),))
            [result] = env.step([Episode(task=task)], [text])
            assert result.outcome == Outcome.ANSWERED
            assert (int(text.rpartition(" ")[2]) == answer) == chat["metadata"]["is_correct"]


class TestPuzzle:
    def test_every_open_path_is_accepted_and_no_other(self):
        [puzzle] = puzzle_world.make_puzzles(1, 7, random.Random(3))
        fields = puzzle_world.make_record(puzzle)
        answers = tuple(fields["answers"])
        task = Task(id=fields["id"], question=fields["question"], answers=answers)
        env = MathEnv(prompt=Prompt(system="", template="{question}"))
        for path in puzzle_world.PATHS:
            text = f"Answer: {' '.join(path)}"
            [reward] = env.score([Episode(task=task, turns=[Turn(text=text)])])
            is_open = not set(puzzle.closed) & set(path)
            assert reward.is_correct == is_open == (path in puzzle.paths)


class TestTrail:
    def follow(self, question, documents):
        """Return the names on the way of a question's trail."""
        name = question["question"].removeprefix("Which word ends the trail of ").rstrip("?")
        names = []
        while name in documents:
            names.append(name)
            name = documents[name].partition(f"{name} says see ")[2].rstrip(".")
        return names

    def test_every_trail_leads_to_its_word(self, world):
        documents = world("trail").documents()
        assert len(documents) == 200
        for question in world("trail").questions():
            names = self.follow(question, documents)
            [answer] = question["answers"]
            assert len(names) == 5
            assert documents[names[-1]].endswith(f". {names[-1]} says the word {answer}.")

    def test_training_data_name_nobody_on_a_held_out_trail(self, world):
        documents = world("trail").documents()
        questions = world("trail").read("questions_eval")
        held_out = {name for q in questions for name in self.follow(q, documents)}
        assert len(held_out) == 50
        trained = world("trail").read("demonstrations") + world("trail").read("questions_train")
        assert not any(name in json.dumps(trained) for name in held_out)


def run_benchmark(name, tmp_path):
    """Return the results of one seed, by the benchmark's own command."""
    worlds.main([f"--world={name}", "--seeds=0", f"--workdir={tmp_path}"])
    return json.loads((tmp_path / name / "results.json").read_text())["0"]


@pytest.mark.slow(
    instead=None,
    because="it compares what BAPO did in the first and the last fifth of a run of minutes",
)
def test_all_parts_of_bapo_act_in_a_run(tmp_path):
    got = run_benchmark("bapo", tmp_path)
    # Of these questions 0.412 have no answer.
    assert got["exact_match, sampled, before"] < 0.3
    assert got["exact_match, sampled, after"] > 0.45
    assert got["exact_match, greedy, after"] > 0.55
    # Of those, many are declined, and hardly any others.
    assert got["abstained, greedy, before"] < 0.1 < got["abstained, greedy, after"]
    assert got["precision, greedy, after"] > got["precision, greedy, before"] + 0.1
    assert got["reliability, sampled, after"] > got["reliability, sampled, before"] + 0.25
    assert got["pay for abstaining, last fifth"] > got["pay for abstaining, first fifth"]
    assert got["groups sampled again"] > 0
    assert 0 < got["share of steps in the late stage"] < 1
    assert got["Python calls, last fifth"] > 0.2


@pytest.mark.slow(
    instead=None,
    because="it compares what DAPO did in the first and the last fifth of a run of minutes",
)
def test_dapo_learns_and_all_parts_act(tmp_path):
    got = run_benchmark("math", tmp_path)
    for suite, least in (("sampled", 0.7), ("greedy", 0.9)):
        assert got[f"exact_match, {suite}, before"] < 0.6
        assert got[f"exact_match, {suite}, after"] > least
    assert got["overlong penalty, first fifth"] < -0.01
    assert got["overlong penalty, last fifth"] > got["overlong penalty, first fifth"] / 2
    assert got["cut off, last fifth"] < got["cut off, first fifth"] / 2
    assert got["groups not kept"] > 0.02
    assert got["batches a step"] > 1
    assert got["clipped tokens"] > 0


@pytest.mark.slow(
    instead=None,
    because="it compares what ARES did in the first and the last fifth of a run of minutes",
)
def test_ares_learns_and_all_parts_act(tmp_path):
    got = run_benchmark("ares", tmp_path)
    assert got["exact_match, greedy, after"] > got["exact_match, greedy, before"] + 0.3
    assert got["easy tasks, last fifth"] > got["easy tasks, first fifth"] + 0.1
    assert got["hard tasks, last fifth"] < got["hard tasks, first fifth"]
    assert got["entropy reward"] != 0
    assert got["groups not kept"] > 0.02
    for bucket in ("easy", "medium", "hard"):
        assert got[f"alpha, {bucket}, end"] != 0.5
        assert got[f"KL multiplier, {bucket}, end"] != 1


@pytest.mark.slow(
    instead=None,
    because="it compares the two halves of a run of minutes, and what each has learnt",
)
def test_pass_at_k_widens_what_is_solved_and_then_pass_at_1_rises(tmp_path):
    got = run_benchmark("puzzles", tmp_path)
    assert got["pass@8, sampled, before"] < 0.5
    assert got["exact_match, sampled, before"] < 0.2
    # With k = 4 nearly every puzzle is solved by one of eight; then there is nothing left to learn.
    assert got["pass@8, halfway"] > 0.9
    assert got["with signal, halfway"] < got["with signal, first fifth"]
    # With k = 1 every single answer counts.
    assert got["exact_match, sampled, after"] > got["exact_match, halfway"] + 0.05
    assert got["exact_match, sampled, after"] > 0.75
    assert got["pass@8, sampled, after"] > 0.85
    assert (got["k, halfway"], got["k, last fifth"]) == (4, 1)

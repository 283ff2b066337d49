"""Mathematics in worker processes: what is equal, and what a hostile answer may cost."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxrl.envs.base import Episode, Reward, ScoredEpisode, Task
from jaxrl.extras.symbolic_math.part import MAX_ANSWER_CHARS, MathVerify, WorkerLostError

EQUAL = [
    (r"\sqrt{4}", "2"),
    (r"\frac{\sqrt{3}}{2}", r"\sqrt{3}/2"),
    (r"x^2+2x+1", r"(x+1)^2"),
    (r"[0,\infty)", r"[0, \infty )"),
    (r"$\{1,2\}$", r"\{2,1\}"),
    (r"The answer is \boxed{3\pi}", r"\pi \cdot 3"),
    (r"\log_2 8", "3"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} \frac22 \\ 2 \end{pmatrix}"),
    ("0.5", r"\frac12"),  # by value, without a worker
    (r"10,\!000\pi", r"10000\pi"),
    (r"\sqrt{1\,000\,003}", r"\sqrt{1{,}000{,}003}"),
    (r"x=\$32,\!348", r"32348"),
]
UNEQUAL = [
    ("x+1", "x+2"),
    (r"(0,1)", r"[0,1]"),
    (r"\sqrt{4}", "-2"),
    (r"3 or 7", "7"),  # no hedging: numbers are not looked for in the text
    ("between 3 and 7", "7"),
    (r"}3\boxed{7", "7"),
    ("0.333333", r"\frac{1}{3}"),  # by value, exactly
    ("", "2"),
    ("I don't know", "2"),
    ("10, 0", r"10,\!000"),
    ("10, 000", r"10,\!000"),
    (r"10, 0\pi", r"10,\!000\pi"),
    (r"\{1,234\}", r"\{1,\!234\}"),
]
HOSTILE = [
    "9^{9^{9^9}}",
    "{" * 900 + "x" + "}" * 900,
    r"\frac{" * 300,
]


def children():
    """Processes that this one has started and that still run."""
    paths = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = [int(pid) for path in paths for pid in path.read_text().split()]
    return {pid for pid in pids if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()}


@pytest.fixture(scope="module")
def math():
    verifier = MathVerify(deadline_s=10.0, memory_mib=1024, workers=1)
    yield verifier
    verifier.close()
    assert children() == set()


@pytest.fixture
def strict():
    """With so little time that hostile answers cost little here, and easy ones are compared."""
    verifier = MathVerify(deadline_s=0.4, memory_mib=1024, workers=1)
    yield verifier
    verifier.close()


def test_expressions_are_compared_by_what_they_mean(math):
    assert [math.is_equal(answer, (truth,)) for answer, truth in EQUAL] == [True] * len(EQUAL)
    assert [math.is_equal(answer, ("q", truth)) for answer, truth in EQUAL[:2]] == [True] * 2
    assert [math.is_equal(answer, (truth,)) is True for answer, truth in UNEQUAL] == [False] * len(
        UNEQUAL
    )
    assert len(children()) == 1


def test_what_value_comparison_decides_asks_no_worker():
    idle = MathVerify(deadline_s=1.0, memory_mib=1024, workers=1)
    before = children()
    for answer, truth in (("0.5", r"\frac12"), ("4", "5"), ("1,000", "1000"), ("x" * 9999, "y")):
        assert idle.is_equal(answer, (truth,)) in (True, False)
    assert idle.is_equal("(" * 100_000, (r"\sqrt{2}",)) is False
    assert MAX_ANSWER_CHARS < 100_000
    assert children() == before


def test_hostile_answers_are_not_equal_and_cost_no_more_than_their_time(strict):
    before, start = children(), time.process_time()
    results = [strict.score_answer(finished(answer)) for answer in HOSTILE]
    assert [result.score for result in results] == [0.0] * len(HOSTILE)
    assert results[0].extra_values["undecided"] == 1.0  # its time was over
    assert time.process_time() - start < 2  # nothing of it was computed here
    assert strict.is_equal("{y}", ("z", "y ^ 1")) is True  # by a fresh worker
    assert len(children() - before) == 1


def test_the_same_question_is_asked_once(math):
    assert math.is_equal(r"\sqrt{16}", ("4",))
    [worker] = children()
    os.kill(worker, signal.SIGSTOP)  # it could not answer
    assert math.is_equal(r"\sqrt{16}", ("4",))
    os.kill(worker, signal.SIGCONT)


def test_a_worker_that_is_killed_is_replaced(math):
    assert math.is_equal(r"\sqrt{25}", ("5",))
    [worker] = children()
    os.kill(worker, signal.SIGKILL)
    assert math.is_equal(r"\sqrt{36}", ("6",)) is True
    assert children() not in (set(), {worker})


def test_memory_is_bounded(math):
    assert math.is_equal(r"\sqrt{49}", ("7",))
    [worker] = children()
    limits = Path(f"/proc/{worker}/limits").read_text().splitlines()
    [space] = [line.split()[3:5] for line in limits if line.startswith("Max address space")]
    assert space == [str(1024 << 20)] * 2
    small = MathVerify(deadline_s=20.0, memory_mib=1, workers=1)
    long = "+".join(["y^{12}"] * 60)
    assert small.is_equal(f"x+{long}", (f"{long}+x",)) is not True  # though it is
    small.close()


def test_a_worker_without_its_library_is_our_failure(monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ImportError('broken')")
    monkeypatch.syspath_prepend(tmp_path)
    broken = MathVerify(deadline_s=1.0, memory_mib=1024, workers=1)
    for _ in range(2):
        with pytest.raises(WorkerLostError, match="broken"):
            broken.is_equal("x+1", ("x+2",))
    broken.close()


def test_no_process_outlives_the_one_that_started_it():
    program = (
        "import os\n"
        "from pathlib import Path\n"
        "from jaxrl.extras.symbolic_math.part import MathVerify\n"
        "math = MathVerify(deadline_s=30.0, memory_mib=1024, workers=1)\n"
        "math.is_equal(r'\\sqrt{4}', ('2',))\n"
        "tasks = Path(f'/proc/{os.getpid()}/task').glob('*/children')\n"
        "pids = [pid for path in tasks for pid in path.read_text().split()]\n"
        "is_worker = lambda pid: b'spawn_main' in Path(f'/proc/{pid}/cmdline').read_bytes()\n"
        "print(*filter(is_worker, pids), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    worker, ends = Path(f"/proc/{int(done.stdout)}"), time.monotonic() + 10
    while worker.exists() and "Z" not in (worker / "stat").read_text().split()[2]:
        assert time.monotonic() < ends, "the worker is still there"
        time.sleep(0.05)


def finished(answer, **reward):
    task = Task(id="t", question="?", answers=("2",))
    return ScoredEpisode(
        episode=Episode(task=task), reward=Reward(parts={}, final_answer=answer, **reward)
    )


def test_the_part_pays_the_final_answer(math):
    answers = [r"\sqrt{4}", "3", ""]
    calls = math.requests([finished(answer) for answer in answers])
    results = [result for call in calls for result in call.parse(call.invoke())]
    assert [result.score for result in results] == [1.0, 0.0, 0.0]
    assert [result.extra_values["undecided"] for result in results] == [0.0, 0.0, 0.0]
    shy = math.score_answer(finished("2, but I don't know", is_abstention=True))
    assert (shy.score, shy.extra_values["undecided"]) == (0.0, 0.0)
    assert math.missing_fields(Task(id="t", question="?")) == ["answers"]

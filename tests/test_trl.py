"""Beside TRL: what both trainers are given, how they take turns, and the tables, by hand."""

import json
import sys

import pytest

from benchmarks import trl, trl_worker
from benchmarks.trl import Reading, Work, Worker
from jaxrl.data.stream import Stream
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.envs.base import Episode, Task, Turn

QUESTION = {"id": "q", "question": "Who won?", "answers": ["Denver Broncos"], "data_source": "s"}
TRAINER = """
import subprocess
from pathlib import Path
from benchmarks.trl_worker import Turns

turns = Turns(Path("{log}"))
for step in range(2):
    turns.next_step()
    with turns.sampling():
        print("said by a library")
        subprocess.run(["echo", "or by a program"])
    with turns.sampling():
        pass
    turns.note(step=step)
turns.end_step()
"""


def test_both_trainers_pay_the_same():
    # "in Denver": one word of two is right, and one of two is found. Articles do not count.
    texts = [" The Denver Broncos.\n", "in Denver", "Carolina", ""]
    task = Task(id="q", messages=({"role": "user", "content": "?"},), answers=("Denver Broncos",))
    ours = Reading().score([Episode(task=task, turns=[Turn(text=text)]) for text in texts])
    assert [one.parts["f1"] for one in ours] == [1.0, 0.5, 0.0, 0.0]
    assert [one.parts["exact_match"] for one in ours] == [1.0, 0.0, 0.0, 0.0]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    answers = [["Denver Broncos"]] * 4
    assert trl_worker.reward(chats, answers, prompts=[]) == [1.0, 0.5, 0.0, 0.0]


def test_both_trainers_get_the_same_prompts_in_order(tiny_world, tmp_path):
    documents = [
        {"id": f"d{i}", "title": "", "text": f"Team{i} won game{i}. It rained."} for i in range(9)
    ]
    questions = [
        {**QUESTION, "id": f"q{i}", "question": f"Who won game{i}?", "answers": [f"Team{i}"]}
        for i in range(9)
    ]
    questions[4]["question"] += " Or who lost it?" * 99
    trl.write_jsonl(tmp_path / "corpus.jsonl", documents)
    for split in ("train", "eval"):
        trl.write_jsonl(tmp_path / f"questions_{split}.jsonl", questions)
    out = tmp_path / "out"
    out.mkdir()
    sizes = {"num_updates": 4, "tasks_per_step": 2, "max_prompt_tokens": 300, "seed": 3}
    model = str(tiny_world / "model")
    trl.write_tasks(tmp_path, model, out, Work(**sizes, num_held_out=2))
    ours, theirs, held_out = (
        trl_worker.read_jsonl(out / f"{name}.jsonl") for name in ("train", "tasks_in_order", "eval")
    )
    assert [one["id"] for one in ours] == [f"q{i}" for i in range(9) if i != 4]
    assert theirs == Stream(ours, seed=3).take(0, 8)
    assert [one["id"] for one in held_out] == ["q0", "q1"]
    asked = ours[0]["messages"][1]["content"]
    assert asked == "Team0 won game0. It rained.\n\nQuestion: Who won game0?"
    tokenizer = Tokenizer.from_folder(model)
    assert max(len(tokenizer.render_prompt(one["messages"])) for one in ours) <= 300
    with pytest.raises(SystemExit, match=r"has 8 questions with at most 300 tokens; expected 10"):
        trl.write_tasks(tmp_path, model, out, Work(**sizes | {"num_updates": 5}))


def test_a_worker_steps_when_told_and_keeps_what_others_print(tmp_path):
    log = tmp_path / "log"
    worker = Worker([sys.executable, "-c", TRAINER.format(log=log)])
    start = worker.read()
    assert start["start_cpu_s"] > 0
    assert start["peak_bytes"] > 2**20
    assert not log.read_text()
    trl.take_turns([worker], 2)
    worker.join()
    assert [one["step"] for one in worker.steps] == [0, 1]
    for one in worker.steps:
        # The second part is counted beside the first, which took a process.
        assert 5e-4 < one["sampling_s"] <= one["step_s"]
        assert 0 <= one["sampling_cpu_s"] <= one["step_cpu_s"]
    assert log.read_text().split("\n").count("or by a program") == 2
    failing = Worker([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(SystemExit, match="ended with 3; see its log"):
        failing.read()
    with pytest.raises(SystemExit, match="ended with 3"):
        failing.join()


def test_other_prompts_are_refused():
    ours, theirs = [{"prompts": [[1, 2], [3]]}], [{"prompts": [[1, 2], [1, 2], [3], [3]]}]
    trl.check_prompts(ours, theirs)
    with pytest.raises(AssertionError, match="the prompts of step 1 differ"):
        trl.check_prompts(ours, [{"prompts": [[3], [3], [1, 2], [1, 2]]}])


def test_the_batches_that_trl_is_given(tmp_path):
    folder = tmp_path / "jaxrl" / "trajectories"
    folder.mkdir(parents=True)
    record = {"token_ids": [5, 6, 7, 2], "prompt_length": 2, "rollout_logprobs": [0, 0, -1, -0.5]}
    (folder / "step_000001.jsonl").write_text(json.dumps(record) + "\n")
    wanted = {"prompt_ids": [[5, 6]], "completion_ids": [[7, 2]], "logprobs": [[-1, -0.5]]}
    assert trl.replayed_batches(tmp_path, 1) == [wanted]
    mine = {"actor/pg_loss": 0.25, "actor/grad_norm": 2.0, "critic/rewards/mean": 0.5}
    [line] = trl.agreement([mine], [{"loss": 0.250001, "grad_norm": 2.0, "reward": 0.5}])
    assert line.startswith("same completions, step 1: loss 0.250000 and 0.250001, grad_norm 2.0")


def steps(seconds, *, sampling=1.0, tokens=40):
    """What a trainer tells: a start of 10 s, then steps of these seconds."""
    start = {"start_cpu_s": 10.0, "peak_bytes": 1}
    return [start] + [
        {
            "step_s": 2 * one,
            "step_cpu_s": one,
            "sampling_cpu_s": sampling,
            "sampled_tokens": tokens,
            "all_tokens": 4 * tokens,
            "peak_bytes": (1 + number) * 10**9,
        }
        for number, one in enumerate(seconds)
    ]


def test_the_table_of_times_by_hand():
    # Two steps to warm up, three that count, and the last one, in which the model is exported.
    told = {"jaxrl": steps([9, 4, 3, 2, 5, 99]), "TRL": steps([8, 6, 6, 6, 6, 99], sampling=2.0)}
    rows = {row[0]: row[1:] for row in trl.speed_rows(told)}
    assert rows["seconds a step"] == ["6.0", "12.0", "0.50"]
    assert rows["processor seconds a step"] == ["3.0", "6.0", "0.50"]
    assert rows["update"] == ["2.0", "4.0", "0.50"]
    assert rows["sampled tokens / processor s of sampling"] == ["40.0", "20.0", "2.00"]
    assert rows["trained tokens / processor s of update"] == ["80.0", "40.0", "2.00"]
    assert rows["loading and compiling, processor s"] == ["17.0", "12.0", "1.42"]
    assert rows["peak memory, GB"] == ["5.00", "5.00", "1.00"]


def evaluation(answers):
    """A record with these values of both measures, by question, and made-up intervals."""
    values = [value for samples in answers.values() for value in samples]
    mean = sum(values) / len(values)
    both = {"exact_match": mean, "f1": mean}
    records = [
        {"task_id": task, "exact_match": value, "f1": value}
        for task, samples in answers.items()
        for value in samples
    ]
    return {
        "summary": {suite: {"all": both} for suite in ("sampled", "greedy")},
        "intervals": {
            suite: {"all": {"exact_match": [0.0, 1.0], "f1": [0.0, 1.0]}}
            for suite in ("sampled", "greedy")
        },
        "questions": {"sampled": records, "greedy": records},
    }


def test_the_table_of_scores_by_hand():
    # The first question is answered alike; the second one in each answer by one of them alone.
    found = {
        "before": evaluation({"a": [0.0, 0.0], "b": [0.0, 0.0]}),
        "jaxrl": evaluation({"a": [1.0, 0.0], "b": [1.0, 1.0]}),
        "TRL": evaluation({"b": [0.0, 0.0], "a": [0.0, 1.0]}),
    }
    rows = trl.score_rows(found)
    assert [row[0] for row in rows] == [
        "exact match, sampled", "f1, sampled", "exact match, greedy", "f1, greedy",
    ]  # fmt: skip
    assert rows[0][1:4] == ["0.000 [0.00, 1.00]", "0.750 [0.00, 1.00]", "0.250 [0.00, 1.00]"]
    # Resampled means of the gaps 0 and 1 are 0, 1/2 or 1, a quarter, a half and a quarter.
    assert rows[0][4] == "0.500 [0.00, 1.00]"


def test_the_command_line(tmp_path):
    flags, work = trl.read_flags(["--recomputes=false", "--lr=1e-4", "--num_updates=5"])
    assert (work.recomputes, work.lr, work.num_updates) == (False, 1e-4, 5)
    assert flags.trl_python == sys.executable
    with pytest.raises(SystemExit, match="--num_updates is 3; expected at least 4"):
        trl.main([f"--out={tmp_path}", "--num_updates=3"])
    (tmp_path / "settings.json").write_text("{}")
    with pytest.raises(SystemExit, match="holds a run of this benchmark; set --out"):
        trl.main([f"--out={tmp_path}"])

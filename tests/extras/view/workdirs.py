"""Workdirs with numbers that are easy to check by hand."""

import json
import threading
from contextlib import contextmanager

from jaxrl.config.schema import default_config, serialize_config
from jaxrl.extras.view.reader import open_runs
from jaxrl.extras.view.server import ViewServer
from jaxrl.extras.view.viewer import Viewer
from tests.qwen import qwen3

TOKENIZER = qwen3()
HOSTILE = (
    "</span></script><script>window.hit=1</script><img src=x onerror='window.hit=2'><!-- "
    "\" onmouseover='window.hit=3' {{7*7}} javascript:window.hit=4 \x00\x1b[2J\u202e &lt; ]]>"
)
FOUND = "<search> q </search>\n\n<information>Doc 1(Title: X) born in Tarvik.</information>\n\n"


def question(task_id, *, right=0.0, response="", **fields):
    """Return an answer as in the files of `eval/`."""
    return {
        "task_id": task_id,
        "sample_index": 0,
        "data_source": "one",
        "question": f"Where is {task_id}?",
        "answers": ["The Tarvik"],
        "final_answer": "Tarvik" if right else "Oslo",
        "outcome": "answered",
        "searches": ["q"] if "<search>" in response else [],
        "num_sampled": 7,
        "response": response,
        "exact_match": right,
        **fields,
    }


FIRST = [
    question("a", response="<answer> Oslo </answer>"),
    question("b", right=1.0, response=FOUND),
    question("c", response=FOUND),
    question("d", response=FOUND),
]
LAST = [
    question("a", right=1.0, response=f"{FOUND}<answer> Tarvik </answer>"),
    question("b", right=1.0, response=FOUND),
    question("c", right=1.0, response=FOUND),
    question("d", response=f"{FOUND}<answer> Oslo </answer>"),
]


def write_json(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def write_lines(path, records):
    """Write records as JSON, and texts as they are, a line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("".join(f"{line}\n" for line in lines))


def write_evaluation(workdir, stage, step, questions, **fields):
    """Write the answers of each suite, and their mean exact match with an interval of ±0.125."""
    summary, intervals = {}, {}
    for suite, rows in questions.items():
        mean = sum(row["exact_match"] for row in rows) / len(rows)
        summary[suite] = {"all": {"exact_match": mean, "num_questions": len(rows)}}
        intervals[suite] = {"all": {"exact_match": [mean - 0.125, mean + 0.125]}}
    weights = {suite: {"exact_match": 1.0} for suite in questions}
    content = {"summary": summary, "intervals": intervals, "reward_weights": weights}
    write_json(
        workdir / "eval" / f"{stage}_{step}.json", content | {"questions": questions} | fields
    )


def make_run(workdir, *, first=FIRST, last=LAST, rewards=(0.25, 0.5, 0.75), **settings):
    """Write two steps of warm start, one of training for each reward, and an evaluation."""
    workdir.mkdir(parents=True)
    config = default_config()
    config.stages = ("sft", "train", "evaluate")
    config.num_steps, config.sft.num_steps = 3, 2
    config.model.path = "data/tiny/model"
    config.update_from_flattened_dict(settings)
    (workdir / "config.json").write_text(serialize_config(config))
    times = {"timing_s/step": 2.0, "timing_s/wall": 3.0, "perf/throughput": 100.0}
    parts = {"timing_s/gen": 0.5, "timing_s/update_actor": 1.5, "timing_s/save_checkpoint": 0.25}
    records = [
        {"step": 1, "stage": "sft", "sft/loss": 4.0, **times},
        {"step": 2, "stage": "sft", "sft/loss": 2.0, **times},
        {"step": 2, "stage": "train", "timing_s/testing": 4.0},
    ]
    for step, reward in enumerate(rewards, 3):
        metrics = {"critic/rewards/mean": reward, "actor/entropy": 0.5, "actor/ppo_kl": None}
        records.append({"step": step, "stage": "train", **metrics, **times, **parts})
    end = 2 + len(rewards)
    records.append({"step": end, "stage": "evaluate"})
    write_lines(workdir / "metrics.jsonl", records)
    write_evaluation(workdir, "train", 2, {"sampled": first})
    write_evaluation(workdir, "evaluate", end, {"sampled": last, "empty_search": first})
    return workdir


def change_records(run, change):
    """Apply `change` to each record of metrics.jsonl."""
    path = run / "metrics.jsonl"
    write_lines(path, [change(json.loads(line)) for line in path.read_text().splitlines()])


def trajectory(task="one", *, reward=1.0, advantage=0.5, **changes):
    """Return the record of a trajectory with a prompt, a search, its result and an answer."""
    texts = [f"Where is {task}?\n", "<search> 字 </search>", "\nBoth.\n", "<answer> x </answer>"]
    ids, mask = [], []
    for text, is_sampled in zip(texts, (0, 1, 0, 1), strict=True):
        tokens = TOKENIZER.encode(text)
        ids += tokens
        mask += [is_sampled] * len(tokens)
    values = [round(-0.125 * position * flag, 6) for position, flag in enumerate(mask)]
    call = {"text": texts[1], "tool_call": "字", "tool": None, "observation": texts[2]}
    return {
        "task_id": task,
        "question": f"Where is {task}?",
        "query": f"Where is {task}?",
        "answers": ["x"],
        "sample_index": 0,
        "outcome": "answered",
        "reward": reward,
        "reward_parts": {"exact_match": reward},
        "final_answer": "x",
        "is_correct": reward == 1.0,
        "advantage": advantage,
        "generated_text": "".join(texts[1:]),
        "turns": [{**call, "error": None}, {"text": texts[3], "tool_call": None}],
        "prompt_length": len(TOKENIZER.encode(texts[0])),
        "token_ids": ids,
        "loss_mask": mask,
        "rollout_logprobs": values,
        "rollout_entropies": [-value for value in values],
    } | changes


def step_file(workdir, step):
    return workdir / "trajectories" / f"step_{step:06d}.jsonl"


def write_trajectories(workdir, *, steps=(3, 4, 5), num=4):
    """Write trajectories of two tasks; in each step the rewards are 0, 1, 0, 1, …"""
    TOKENIZER.save_pretrained(workdir / "export")
    for step in steps:
        records = [
            trajectory(f"task {i // 2}", reward=float(i % 2), advantage=i % 2 - 0.5)
            for i in range(num)
        ]
        write_lines(step_file(workdir, step), records)


def make_hostile(workdir):
    """Write a run in which all texts contain HTML, scripts or terminal codes."""
    fields = dict.fromkeys(("question", "final_answer", "error"), HOSTILE)
    response = f"<think>{HOSTILE}</think>{HOSTILE}<search>{HOSTILE}</search><information>{HOSTILE}"
    bad = [question(HOSTILE, response=response, answers=[HOSTILE], **fields)]
    run = make_run(workdir, first=bad, last=bad, **{"prompt.system": HOSTILE[:-20]})
    means = {"exact_match": 0.5, HOSTILE: 0.25, "num_questions": 4}
    for stage, step in (("train", 2), ("evaluate", 5)):
        summary = {suite: {"all": means, HOSTILE: means} for suite in ("sampled", HOSTILE)}
        write_evaluation(run, stage, step, {"sampled": bad, HOSTILE: bad}, summary=summary)
    sign = {"step": 4, "stage": "train", "sign": HOSTILE, "text": HOSTILE, "action": HOSTILE}
    write_lines(run / "sentinel.jsonl", [sign])
    turn = dict.fromkeys(("text", "tool_call", "tool", "observation", "error"), HOSTILE)
    odd = {"turns": [3, None, {"records": 3}], "answers": {"a": 1}, "contexts": [[1, "x"], 3]}
    texts = dict.fromkeys(("query", "question", "final_answer", "outcome", "more"), HOSTILE)
    record = trajectory(HOSTILE, answers=[HOSTILE], turns=[turn], **texts)
    calls = [{"call": HOSTILE, "tool": HOSTILE}]
    write_lines(step_file(run, 3), [record | {"reward_records": calls}, record | odd])
    return run


def view(*workdirs, ignore=()):
    """Return a viewer that has read the runs."""
    viewer = Viewer(open_runs(workdirs), ignore)
    viewer.refresh()
    return viewer


@contextmanager
def served(*workdirs):
    """Yield a server for the runs, on a free port."""
    server = ViewServer(Viewer(open_runs(workdirs)), 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()

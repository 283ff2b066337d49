"""Runs made by hand: random trajectories, metrics, evaluations, and hostile text."""

import json
import threading

import numpy as np

from jaxrl.config.schema import default_config, to_json
from jaxrl.extras.view.pages import Pages, open_runs
from jaxrl.extras.view.server import Server
from tests.qwen import qwen3

OUTCOMES = ("answered", "abstained", "malformed", "out_of_budget", "environment_error")
QUESTIONS = ("Where is Avington?", "WHO is Ada Kerr?", "Où est l'Élysée ?", "Straße, naïve 𝒳 字")
HOSTILE = (
    "</span></script><script>window.hit=1</script><img src=x onerror='window.hit=2'>"
    "\" onmouseover='window.hit=3' {{7*7}} javascript:window.hit=4 \x00\x1b[2J\u202e &lt; ]]>"
)
TOKENIZER = qwen3()
LISTS = (
    *("old_logprobs", "new_logprobs", "ref_logprobs", "kl_weights", "token_weights"),
    "token_advantages",
)


def drawn_record(rng, tokenizer, *, has_lists=True, **changes):
    """A trajectory as training writes it, of random numbers; some fields are missing or null."""
    task = int(rng.integers(6))
    question = QUESTIONS[task % len(QUESTIONS)]
    outcome = OUTCOMES[rng.integers(len(OUTCOMES))]
    prompt = tokenizer.encode(f"{question}\n")
    said = tokenizer.encode(f"<search> 字 {task} </search>")
    found = tokenizer.encode("\n<information>naïve, Straße</information>\n")
    answer = tokenizer.encode("<answer> 𝒳 Kerr </answer>")
    ids = [*prompt, *said, *found, *answer]
    mask = [*[0] * len(prompt), *[1] * len(said), *[0] * len(found), *[1] * len(answer)]

    def drawn():
        return (rng.normal(size=len(ids)) * mask).round(6).tolist()

    is_failed = outcome == "environment_error"
    record = {
        "task_id": f"task {task}",
        "question": None if task == 5 else question,
        "query": question,
        "answers": ["Kerr", "字"],
        "data_source": "one",
        "sample_index": int(rng.integers(4)),
        "attempt": 0,
        "outcome": outcome,
        "reward": None if is_failed else round(float(rng.normal()), 3),
        "reward_parts": {"exact_match": 0.0, "format": 0.5},
        "final_answer": f"answer {task}" if outcome == "answered" else "",
        "is_correct": bool(rng.random() < 0.4),
        "advantage": None if is_failed else round(float(rng.normal()), 3),
        "generated_text": "as said",
        "turns": [
            {
                "text": "<search> 字 </search>",
                "tool_call": f"字 {task}",
                "tool": None,
                "observation": "\n<information>naïve, Straße</information>\n",
                "latency_s": 0.25,
                "error": None,
                "records": [],
            },
            {"text": "<answer> 𝒳 Kerr </answer>", "tool_call": None, "observation": None},
        ],
        "prompt_length": len(prompt),
        "token_ids": ids,
        "loss_mask": mask,
        "rollout_logprobs": [-abs(x) for x in drawn()],
        "rollout_entropies": [abs(x) for x in drawn()],
        "policy_versions": [3 if one else -1 for one in mask],
    }
    if has_lists:
        record |= {name: drawn() for name in LISTS}
    return record | {"group_id": 0, "accuracy": None if is_failed else 1.0} | changes


def write_lines(path, records):
    """Writes records, and texts as they are, a line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in records
    ]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def step_file(workdir, step):
    return workdir / "trajectories" / f"step_{step:06d}.jsonl"


def evaluation(step, *answers, stage="train", weights=None):
    """Content of an evaluation's file; each answer is a task, an answer and its exact match."""
    return {
        "step": step,
        "stage": stage,
        "reward_weights": {"greedy": weights or {"exact_match": 1.0, "format": 0.5}},
        "questions": {
            "greedy": [
                {
                    "task_id": task,
                    "question": f"About {task}?",
                    "answers": ["Kerr"],
                    "final_answer": answer,
                    "outcome": "answered",
                    "searches": ["q"],
                    "response": f"<answer> {answer} </answer>",
                    "exact_match": float(is_right),
                    "format": 0.5,
                }
                for task, answer, is_right in answers
            ]
        },
    }


def make_run(workdir, *, seed=0, steps=(1, 2, 5), num=7, has_tokenizer=True, **settings):
    """A run with files of all kinds; its trajectories are drawn by `seed`."""
    rng, tokenizer = np.random.default_rng(seed), TOKENIZER
    workdir.mkdir(parents=True)
    config = default_config()
    config.model.path = str(workdir / "no_model")
    config.update_from_flattened_dict(settings)
    (workdir / "config.json").write_text(to_json(config))
    if has_tokenizer:
        tokenizer.save_pretrained(workdir / "export")
    for step in steps:
        write_lines(step_file(workdir, step), [drawn_record(rng, tokenizer) for _ in range(num)])
    records = [
        {
            "step": step,
            "stage": "train",
            "critic/rewards/mean": round(float(rng.normal()), 6),
            "actor/entropy": round(float(rng.random()), 6),
            "sentinel/entropy_rise": int(step == 3),
            "response_length/mean": None,
        }
        for step in range(1, 6)
    ]
    write_lines(workdir / "metrics.jsonl", records)
    told = {
        "step": 3,
        "stage": "train",
        "sign": "entropy_rise",
        "text": "it rose",
        "action": "told",
    }
    write_lines(workdir / "sentinel.jsonl", [told])
    content = evaluation(5, ("task 1", "Kerr", True), ("held out", "Oslo", False))
    (workdir / "eval").mkdir()
    (workdir / "eval" / "train_5.json").write_text(json.dumps(content))
    return workdir


class Served:
    """Pages of some runs, read once, and a server of them on a free port."""

    def __init__(self, *workdirs, follows=False):
        """Serves them until the end of the `with`.

        Args:
            workdirs: of the runs.
            follows: look for changes, too.
        """
        self.pages = Pages(open_runs(workdirs, is_kept=False))
        if follows:
            self.pages.follow()
        else:
            self.pages.refresh_curves()
            self.pages.refresh_index()
        self.server = Server(self.pages, 0)
        self.address = self.server.address
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
        self.pages.close()

"""A method trained to its score: the policy learns which of two names a question asks for."""

import itertools
import random

import pytest

from configs.small_world import small_world
from examples import quickstart_world as world
from jaxrl import api
from tests.runs import records

NAMES = world.FIRST_NAMES[:32]
NUM_HELD_OUT = 60
SCORE = "val-core/all/exact_match/mean@1"


def write_world(folder):
    """Write tasks whose answer is the first of two names, and demonstrations that guess.

    The demonstrations teach to copy one of the two names. Which one, only rewards can teach.
    """
    rng = random.Random(0)
    pairs = list(itertools.permutations(NAMES, 2))
    rng.shuffle(pairs)

    def task(pair):
        return {"id": " ".join(pair), "question": f"{pair[0]} or {pair[1]}", "answers": [pair[0]]}

    def demonstration(pair):
        answer = f"Answer: {rng.choice(pair)}{world.END_OF_TURN}"
        user = {"role": "user", "content": task(pair)["question"]}
        return {"messages": [user, {"role": "assistant", "content": answer}]}

    files = {
        "questions_train": [task(pair) for pair in pairs[NUM_HELD_OUT:]],
        "questions_eval": [task(pair) for pair in pairs[:NUM_HELD_OUT]],
        "demonstrations": [demonstration(pair) for pair in pairs[NUM_HELD_OUT:]],
    }
    texts = world.iter_training_texts(files["demonstrations"], NAMES)
    world.write_model(folder / "model", world.train_tokenizer(texts), seed=0)
    for name, rows in files.items():
        world.write_jsonl(folder / f"{name}.jsonl", rows)
    return folder


@pytest.mark.usefixtures("quick_compilation", "no_pictures", "one_size")
def test_a_policy_learns_what_demonstrations_do_not_show(tmp_path):
    config = small_world(str(write_world(tmp_path / "world")))
    config.update_from_flattened_dict(
        {
            **{"env.name": "math", "search.local.corpus": ""},
            **{"sft.num_steps": 200, "sft.optimizer.micro_rows": 32},
            **{"num_steps": 24, "optimizer.lr": 3e-3, "optimizer.micro_rows": 64},
            **{"rollout.tasks_per_step": 16, "rollout.max_num_seqs": 128},
            **{"rollout.max_prompt_tokens": 16, "rollout.max_response_tokens": 8},
            **{"rollout.max_total_tokens": 24, "rollout.chunk_tokens": 8},
            **{"eval.suites": ("sampled",), "eval.final_suites": ("sampled",)},
            "model.remat": "none",  # compiles faster
        }
    )
    api.train(config, tmp_path / "run")
    scores = [record[SCORE] for record in records(tmp_path / "run") if SCORE in record]
    before, *_, after = scores
    assert 0.2 < before < 0.6  # the demonstrations guess
    assert after > 0.9

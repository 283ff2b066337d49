"""A world whose answers only a tool knows: the colors of shelves, by Qwen's tool calls."""

import json
import random

import numpy as np
import safetensors.numpy

from configs import debug_tiny
from examples.quickstart_world import init_weights, make_generation_config, make_model_config
from jaxrl.builders.validation import validate
from jaxrl.logs.display import Display
from jaxrl.run import run
from tests.helpers import build, settings_of
from tests.qwen import TEMPLATE, TEMPLATE_3_5, qwen3

COLORS = ("red", "blue", "green", "black", "white", "brown", "pink", "gray")


def color(number):
    """Return the color of a shelf, which no question contains."""
    return COLORS[number * number * 7 // 3 % len(COLORS)]


def look_up(number: int) -> str:
    """Return the color of a shelf.

    Args:
        number: The shelf.
    """
    return color(number)


def call(number):
    block = json.dumps({"name": "look_up", "arguments": {"number": number}})
    return f"<tool_call>\n{block}\n</tool_call>"


def call_3_5(number):
    parameter = f"<parameter=number>\n{number}\n</parameter>"
    return f"<tool_call>\n<function=look_up>\n{parameter}\n</function>\n</tool_call>"


FAMILIES = {
    "qwen3": (TEMPLATE, "", call),
    "qwen3_5": (TEMPLATE_3_5, "<think>\nshelf\n</think>", call_3_5),
}
"""Chat template, thought before every message, and function that writes a call."""


def chat(numbers, thought="", call=call):
    """Return a demonstration: a call for each shelf in one turn, and the last one's color."""
    return [
        {"role": "user", "content": question(numbers)},
        {"role": "assistant", "content": thought + "\n".join(map(call, numbers))},
        *({"role": "tool", "content": color(number)} for number in numbers),
        {"role": "assistant", "content": f"{thought}<answer>{color(numbers[-1])}</answer>"},
    ]


def question(numbers):
    return f"Shelf {' then '.join(map(str, numbers))}?"


def write_lines(path, objects):
    path.write_text("".join(json.dumps(fields) + "\n" for fields in objects))


def write(folder, tools, *, family="qwen3", num_shelves=40, seed=0):
    """Write model, tokenizer, questions and demonstrations.

    Args:
        folder: Existing folder.
        tools: Chat schemas of the run's tools, whose text the tokenizer learns.
        family: Family of the model, a key of `FAMILIES`.
        num_shelves: Number of shelves.
        seed: Random seed of questions and weights.
    """
    rng = random.Random(seed)
    shelves = [[n] for n in range(num_shelves)]
    shelves += [rng.sample(range(num_shelves), 2) for _ in range(num_shelves)]
    rng.shuffle(shelves)
    template, thought, write_call = FAMILIES[family]
    chats = [chat(numbers, thought, write_call) for numbers in shelves]
    texts = [m["content"] for messages in chats for m in messages]
    header = qwen3(template).apply_chat_template(chats[0][:1], tools=tools, tokenize=False)
    hf = qwen3(template, [header, *texts, *COLORS], num_merges=500)
    model = folder / "model"
    hf.save_pretrained(model)
    config = make_model_config(hf.backend_tokenizer, model=family)
    for name, fields in {
        "config": config,
        "generation_config": make_generation_config(hf.backend_tokenizer),
    }.items():
        (model / f"{name}.json").write_text(json.dumps(fields))
    weights = init_weights(config, np.random.default_rng(seed))
    safetensors.numpy.save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    write_lines(folder / "demonstrations.jsonl", [{"messages": m} for m in chats])
    tasks = [
        {"id": str(i), "question": question(numbers), "answers": [color(numbers[-1])]}
        for i, numbers in enumerate(shelves)
    ]
    write_lines(folder / "questions_train.jsonl", tasks[len(tasks) // 4 :])
    write_lines(folder / "questions_eval.jsonl", tasks[: len(tasks) // 4])
    return hf


def config_of(folder, **changes):
    config = debug_tiny.get_config(str(folder))
    settings = {
        "stages": ("sft", "train"),
        "num_steps": 2,
        "env.search.protocol": "qwen",
        "env.search.tools": ("tests.tool_world.look_up",),
        "search.engine": "none",
        "reward.weights": {"exact_match": 1.0, "format": 0.5},
        "rollout.max_prompt_tokens": 176,
        "rollout.max_response_tokens": 64,
        "rollout.max_total_tokens": 304,
        "rollout.max_observation_tokens": 12,
        "rollout.max_num_seqs": 4,
        "eval.suites": (),
        "log.trajectories": -1,
        "sft.num_steps": 60,
        "model.remat": "none",
    }
    config.update_from_flattened_dict({**settings, **changes})
    return config


def play(config, workdir):
    """Run it and return its components."""
    validate(config)
    workdir.mkdir()
    components = build(config)
    run(settings_of(config), workdir, components, Display())
    return components

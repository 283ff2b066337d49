"""Whole runs of a vision model: trained, killed, resumed, exported; its options matter."""

import base64
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest
from flax.traverse_util import flatten_dict
from transformers import PreTrainedTokenizerFast

from jaxrl.config.schema import default_config, to_json
from jaxrl.extras.chat import __main__ as chat
from jaxrl.extras.vision.qwen3_vl import Qwen3Vision, Qwen3VLConfig
from jaxrl.extras.vision.qwen_vl import QwenVLConfig
from jaxrl.extras.vision.vision import QwenVision
from jaxrl.logs.display import Display
from jaxrl.models.hf_weights import load_hf, save_hf
from jaxrl.run import run
from tests.helpers import ROOT, build, settings_of, tiny_params, with_devices
from tests.images import PAD, SPECIAL, TEMPLATE, drawn, encoded, looking_tokenizer, save_processor
from tests.runs import assert_same_weights, evaluation, killed, lasting
from tests.servers import served

pytestmark = [pytest.mark.minutes, pytest.mark.usefixtures("quick_compilation", "no_pictures")]


def tokenizer_files(folder):
    """The toy's tokenizer, as a checkpoint has it."""
    made = looking_tokenizer()
    hf = PreTrainedTokenizerFast(
        tokenizer_object=made._tokenizer,
        eos_token="<|im_end|>",
        additional_special_tokens=list(SPECIAL),
        chat_template=TEMPLATE,
    )
    hf.save_pretrained(folder)


def tower():
    """Sizes of a small one."""
    [pad] = looking_tokenizer().encode(PAD)
    return dict(
        width=16, mlp_width=24, num_layers=2, num_heads=2, out_width=32, channels=3, patch=4,
        temporal_patch=2, merge=2, rope_theta=1e4, token_id=pad,
    )  # fmt: skip


DECODER = dict(
    vocab_size=320, width=32, mlp_width=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    rope_theta=1e4, rms_norm_eps=1e-6, tie_embeddings=False, output_bias=False, max_positions=512,
    mrope_section=(2, 1, 1), video_id=319,
)  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Four drawings to be told apart, and a model that cannot yet."""
    vision = QwenVision(**tower(), window=4, full_layers=(1,))
    config = QwenVLConfig(**DECODER, qkv_bias=True, qk_norm=False, tower=vision)
    return make_world(tmp_path_factory.mktemp("looking"), config)


@pytest.fixture(scope="module")
def qwen3_world(tmp_path_factory):
    """The same for a Qwen3-VL, both of whose layers see images."""
    vision = Qwen3Vision(**tower(), side=3, deepstack_layers=(0, 1))
    config = Qwen3VLConfig(**DECODER, qkv_bias=False, qk_norm=True, tower=vision)
    return make_world(tmp_path_factory.mktemp("looking_deeper"), config)


def make_world(folder, config):
    save_hf(jax.tree.map(jnp.asarray, tiny_params(config)), config, folder / "model")
    tokenizer_files(folder / "model")
    save_processor(folder / "model")
    rows = []
    for seed in range(4):
        (folder / f"{seed}.png").write_bytes(encoded(drawn(seed=seed)))
        question = "<image>What?" if seed else "What is seen?"  # one is text alone
        row = {"question": question, "answers": ["a"]}
        rows.append(row | ({"images": [f"{seed}.png"]} if seed else {}))
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chats = [
        {
            "messages": [
                {"role": "user", "content": "<image>What?"},
                {"role": "assistant", "content": "abcd"[seed] * 3},
            ],
            "images": [f"{seed}.png"],
        }
        for seed in range(1, 4)
    ]
    (folder / "demonstrations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    return folder


def settings(world, **changes):
    config = default_config()
    config.update_from_flattened_dict(
        {
            "stages": ("train",),
            "num_steps": 2,
            "env.name": "math",
            "tasks.train.source": str(world / "tasks.jsonl"),
            "tasks.eval.source": str(world / "tasks.jsonl"),
            "eval.suites": (),
            "model.path": str(world / "model"),
            "model.remat": "none",
            "rollout.tasks_per_step": 4,
            "rollout.group_size": 2,
            "rollout.max_prompt_tokens": 80,
            "rollout.max_response_tokens": 8,
            "rollout.max_total_tokens": 96,
            "rollout.max_image_tokens": 24,
            "rollout.max_num_seqs": 4,
            "rollout.chunk_tokens": 8,
            "optimizer.micro_rows": 4,
            "optimizer.lr": 1e-3,
            "optimizer.num_minibatches": 2,
            "optimizer.skip_signal_free": False,
            "loss.entropy_coef": 0.01,  # which has a gradient where no reward has
            "kl.coef": 0.01,
            "checkpoint.every_steps": 1,
            **changes,
        }
    )
    return config


def grad_norms(workdir):
    return [r["actor/grad_norm"] for r in lasting(workdir) if "actor/grad_norm" in r]


@pytest.mark.slow(instead="runtime/test_sharding.py::test_two_devices_compute_what_one_does")
def test_a_run_whose_rows_are_cut_between_devices_is_that_of_one(
    world, tmp_path, quick_compilation
):
    config = settings(world, num_steps=1)
    (tmp_path / "one").mkdir()
    run(settings_of(config), tmp_path / "one", build(config), Display())
    program = "import sys; from tests import test_vision_runs as t; t.run_cut(*sys.argv[1:])"
    result = subprocess.run(
        [sys.executable, "-c", program, world, tmp_path / "cut"],
        cwd=ROOT,
        env=os.environ | quick_compilation | with_devices(2),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    wanted, got = grad_norms(tmp_path / "one"), grad_norms(tmp_path / "cut")
    assert len(got) == 1
    assert got == pytest.approx(wanted, rel=1e-4)
    gaps = [r.get("rollout_corr/logprob_diff_max") for r in lasting(tmp_path / "cut")]
    assert max(gap for gap in gaps if gap is not None) < 1e-4  # of the sampler and the update


def run_cut(world, workdir):
    config = settings(Path(world), num_steps=1, **{"mesh.data": 1, "mesh.context": 2})
    Path(workdir).mkdir()
    run(settings_of(config), Path(workdir), build(config), Display())


@pytest.mark.slow(
    instead="training/test_images.py::test_a_frozen_tower_gets_no_gradient_and_stays_as_it_is"
)
def test_a_frozen_tower_stays_as_it_is_and_is_in_no_checkpoint(world, tmp_path):
    config = settings(world, **{"model.freeze_tower": True})
    whole = tmp_path / "whole"
    whole.mkdir()
    run(settings_of(config), whole, build(config), Display())
    before, after = load_hf(world / "model"), load_hf(whole / "export")
    jax.tree.map(np.testing.assert_array_equal, before["vision"], after["vision"])
    assert (before["embed"]["embedding"] != after["embed"]["embedding"]).any()
    for item, kinds in (("params", 1), ("ref_params", 1), ("optimizer", 2)):
        names = (whole / "checkpoints" / "1" / item / "_METADATA").read_text()
        assert names.count("'embed', 'embedding'") == kinds
        assert "vision" not in names
    again = killed(whole, tmp_path / "again", after=1)
    run(settings_of(config), again, build(config), Display())
    assert_same_weights(whole / "export", again / "export")


@pytest.mark.slow(
    instead="training/test_images.py::test_all_packings_have_the_gradient_of_each_sequence_alone"
)
def test_qwen3_learns_from_demonstrations_and_rewards_and_goes_on_bit_for_bit(
    qwen3_world, tmp_path
):
    changes = {
        "stages": ("sft", "train"),
        "sft.source": str(qwen3_world / "demonstrations.jsonl"),
        "sft.num_steps": 12,
        "sft.batch_size": 3,
        "sft.optimizer.lr": 1e-2,
        "sft.optimizer.warmup_steps": 1,
    }
    config = settings(qwen3_world, **changes)
    whole = tmp_path / "whole"
    whole.mkdir()
    run(settings_of(config), whole, build(config), Display())
    steps = lasting(whole)
    losses = [record["sft/loss"] for record in steps if "sft/loss" in record]
    assert losses[-1] < 0.5 * losses[0]
    # What the sampler saw is what the update sees.
    gaps = [r["rollout_corr/logprob_diff_max"] for r in steps if "actor/grad_norm" in r]
    assert len(gaps) == 2
    assert max(gaps) < 1e-4
    before, after = load_hf(qwen3_world / "model"), load_hf(whole / "export")
    has_moved = jax.tree.map(lambda one, other: bool((one != other).any()), before, after)
    assert all(jax.tree.leaves(has_moved["vision"]["deepstack"]))
    assert has_moved["vision"]["positions"]["embedding"]
    again = killed(whole, tmp_path / "again", after=13)
    run(settings_of(config), again, build(config), Display())
    assert_same_weights(whole / "export", again / "export")


@pytest.mark.slow(instead="extras/lora/test_update.py::test_an_update_changes_the_adapter_alone")
def test_an_adapter_learns_beside_a_frozen_tower_and_goes_on_bit_for_bit(world, tmp_path):
    """All stages: what carries images is trained on, and of the model's weights none moves."""
    demonstrations = tmp_path / "demonstrations.jsonl"
    said = [("user", "<image>What?"), ("assistant", "a")]
    messages = [{"role": role, "content": content} for role, content in said]
    lines = [{"messages": messages, "images": [f"{i}.png"]} for i in (1, 2)]
    demonstrations.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for i in (1, 2):
        shutil.copy(world / f"{i}.png", tmp_path)
    num_sft, num_train = 3, 2
    lora = {"model.lora.rank": 4, "model.lora.targets": ("q_proj", "down_proj")}
    stages = {
        "stages": ("sft", "train"),
        "sft.source": str(demonstrations),
        "sft.num_steps": num_sft,
        "sft.batch_size": 2,
        "checkpoint.keep": 100,
    }
    config = settings(world, **lora, **stages)
    whole = tmp_path / "whole"
    whole.mkdir()
    parts = build(config)
    run(settings_of(config), whole, parts, Display())
    before, after = load_hf(world / "model"), load_hf(whole / "export")
    jax.tree.map(np.testing.assert_array_equal, parts.model.base, before)
    moved = jax.tree.map(lambda one, other: bool((one != other).any()), before, after)
    found = {path for path, is_moved in flatten_dict(moved, sep="/").items() if is_moved}
    assert found == {"blocks/attention/q/kernel", "blocks/mlp/down/kernel"}
    record = lasting(whole)
    assert record[num_sft - 1]["sft/loss"] < record[0]["sft/loss"]
    steps = [line for line in record if "actor/grad_norm" in line]
    assert len(steps) == num_train
    assert all(line["actor/grad_norm"] > 0 for line in steps)
    assert all(line["rollout_corr/logprob_diff_max"] < 1e-4 for line in steps)
    again = killed(whole, tmp_path / "again", after=num_sft + 1)
    run(settings_of(config), again, build(config), Display())
    assert lasting(again) == record
    assert_same_weights(whole / "export", again / "export")


def test_a_model_behind_an_endpoint_is_shown_the_images(world, tmp_path):
    """It answers by what it sees: the drawing of a file, or nothing."""
    model = shutil.copytree(world / "model", tmp_path / "model")
    for file in model.glob("*.safetensors"):
        file.unlink()  # no weights are read
    changes = {
        "stages": ("evaluate",),
        "policy.name": "openai",
        "policy.openai.model": "their-model",
        "eval.final_suites": ("greedy", "blank_images"),
        "eval.samples": 1,
        "eval.resamples": 20,
        "model.path": str(model),
        "rollout.max_response_tokens": 16,
    }
    drawings = {(world / f"{seed}.png").read_bytes() for seed in range(1, 4)}
    seen = []

    def answer(request):
        content = request.json["messages"][-1]["content"]
        said = "Answer: a"  # of the question without an image
        if not isinstance(content, str):
            url = content[0]["image_url"]["url"]
            data = base64.b64decode(url.removeprefix("data:image/png;base64,"))
            seen.append(data)
            said = "Answer: a" if data in drawings else "Answer: b"
        return {"choices": [{"message": {"content": said}, "finish_reason": "stop"}]}

    made_with = []
    with served(answer) as server:
        changes["policy.openai.url"] = server.url
        for again in ({}, {"images.cache_mib": 1.0}, {"images.max_pixels": 10**6}):
            config = settings(world, **changes, **again)
            run(settings_of(config), tmp_path, build(config, workdir=tmp_path), Display())
            made_with.append(evaluation(tmp_path, "evaluate_0.json")["made_with"])
    assert len(seen) == 6  # answers are kept
    assert drawings < set(seen)
    [blank] = set(seen) - drawings
    assert PIL.Image.open(io.BytesIO(blank)).size == drawn().size
    summary = evaluation(tmp_path, "evaluate_0.json")["summary"]
    assert summary["greedy"]["all"]["exact_match"] == 1.0
    assert summary["blank_images"]["all"]["exact_match"] == 0.25
    # It is made again where images are cut otherwise, and not for the size of a cache.
    first, other_cache, other_size = made_with
    assert first == other_cache != other_size


def test_a_question_may_show_images(world, tmp_path, capsys):
    """Prints the question, its images' marks included; files that are none are refused."""
    (tmp_path / "config.json").write_text(to_json(settings(world)))
    asked = [str(tmp_path), f"--model={world / 'model'}", f"--image={world / '1.png'}"]
    chat.main([*asked, "What?", "Is <image> a?"])
    shown = capsys.readouterr().out.split("\n\n")[1:]
    assert [text.splitlines()[0] for text in shown] == ["<image>What?", "Is <image> a?"]
    for further, told in (
        (world / "none.png", f"error: {world / 'none.png'} cannot be read as an image: "),
        (world / "tasks.jsonl", f"error: {world / 'tasks.jsonl'} cannot be read as an image: "),
    ):
        with pytest.raises(SystemExit, match=f"^{re.escape(told)}"):
            chat.main([*asked, f"--image={further}", "What?"])

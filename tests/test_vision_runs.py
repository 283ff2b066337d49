"""Complete runs of vision models: trained, killed, resumed, exported."""

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
from transformers import PreTrainedTokenizerFast

from jaxrl.config.schema import default_config, serialize_config
from jaxrl.extras.chat import __main__ as chat
from jaxrl.extras.vision.qwen2_vl import Qwen2Vision, Qwen2VLConfig
from jaxrl.extras.vision.qwen3_5 import Qwen35Vision
from jaxrl.extras.vision.qwen3_vl import Qwen3Vision, Qwen3VLConfig
from jaxrl.extras.vision.qwen_vision import QwenVision
from jaxrl.extras.vision.qwen_vl import QwenVLConfig
from jaxrl.logs.display import Display
from jaxrl.models.hf_weights import load_hf, save_hf
from jaxrl.models.registry import resolve_architecture
from jaxrl.run import run
from tests.helpers import ROOT, build, settings_of, tiny_params, with_devices
from tests.images import (
    PAD,
    SPECIAL,
    VIDEO_PAD,
    VIDEO_TEMPLATE,
    drawn,
    encode_video,
    encoded,
    save_processor,
    video_tokenizer,
)
from tests.runs import assert_same_weights, evaluation, killed, lasting
from tests.servers import served

pytestmark = [pytest.mark.minutes, pytest.mark.usefixtures("quick_compilation", "no_pictures")]


def tokenizer_files(folder):
    """Write the toy tokenizer as in a checkpoint."""
    hf = PreTrainedTokenizerFast(
        tokenizer_object=video_tokenizer()._tokenizer,
        eos_token="<|im_end|>",
        additional_special_tokens=[*SPECIAL, VIDEO_PAD],
        chat_template=VIDEO_TEMPLATE,
    )
    hf.save_pretrained(folder)


def tower():
    """Return the sizes of a small vision tower."""
    pad, video_pad = video_tokenizer().encode(PAD + VIDEO_PAD)
    return dict(
        width=16, mlp_width=24, num_layers=2, num_heads=2, out_width=32, channels=3, patch=4,
        temporal_patch=2, merge=2, rope_theta=1e4, token_id=pad, video_id=video_pad,
    )  # fmt: skip


DECODER = dict(
    vocab_size=320, width=32, mlp_width=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    rope_theta=1e4, rms_norm_eps=1e-6, tie_embeddings=False, output_bias=False, max_positions=512,
    mrope_section=(2, 1, 1),
)  # fmt: skip


def qwen2_vl():
    """Return a Qwen2-VL."""
    vision = Qwen2Vision(**tower() | {"mlp_width": 32})
    return Qwen2VLConfig(**DECODER, qkv_bias=True, qk_norm=False, tower=vision)


def qwen3_5():
    """Return a Qwen3.5 with a delta net and a layer with attention."""
    family = resolve_architecture({"model_type": "qwen3_5"}, "", "config.json")
    return family(
        **DECODER | {"head_dim": 16, "rotary_fraction": 0.5, "attention_layers": (1,)},
        **{"num_key_heads": 2, "num_value_heads": 4, "key_dim": 8, "value_dim": 8},
        **{"qkv_bias": False, "qk_norm": True, "conv_width": 4, "has_tower": True},
        tower=Qwen35Vision(**tower(), side=3),
    )


def qwen3_5_moe():
    """Return a Qwen3.5 with experts in both layers."""
    family = resolve_architecture({"model_type": "qwen3_5_moe"}, "", "config.json")
    experts = dict(expert_width=24, num_experts=4, top_k=2, renormalize=True, shared_width=20)
    return family(**vars(qwen3_5()) | experts | {"mlp_width": 20, "expert_layers": (0, 1)})


OTHER_FAMILIES = {"qwen2_vl": qwen2_vl, "qwen3_5": qwen3_5, "qwen3_5_moe": qwen3_5_moe}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Return the folder of four tasks about drawings, and an untrained Qwen2.5-VL."""
    vision = QwenVision(**tower(), window=4, full_layers=(1,))
    config = QwenVLConfig(**DECODER, qkv_bias=True, qk_norm=False, tower=vision)
    return make_world(tmp_path_factory.mktemp("looking"), config)


@pytest.fixture(scope="module")
def qwen3_world(tmp_path_factory):
    """Return the same with a Qwen3-VL, both of whose layers see images, and a video."""
    vision = Qwen3Vision(**tower(), side=3, deepstack_layers=(0, 1))
    config = Qwen3VLConfig(**DECODER, qkv_bias=False, qk_norm=True, tower=vision)
    folder = make_world(tmp_path_factory.mktemp("looking_deeper"), config)
    # Three frames, of which the last fills up the second patch.
    for name in ("tasks.jsonl", "demonstrations.jsonl"):
        text = (folder / name).read_text()
        text = text.replace('"images": ["3.png"]', '"videos": [["1.png", "2.png", "3.png"]]')
        *rows, last = text.splitlines()
        last = last.replace("<image>", "<video>")
        (folder / name).write_text("\n".join([*rows, last]) + "\n")
    return folder


def make_world(folder, config):
    folder.mkdir(exist_ok=True)
    save_hf(jax.tree.map(jnp.asarray, tiny_params(config)), config, folder / "model")
    tokenizer_files(folder / "model")
    save_processor(folder / "model")
    rows = []
    for seed in range(4):
        (folder / f"{seed}.png").write_bytes(encoded(drawn(seed=seed)))
        row = {"question": "<image>What?", "images": [f"{seed}.png"]}
        row = row if seed else {"question": "What is seen?"}
        rows.append(row | {"answers": ["a"]})
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


def train_in(workdir, config):
    workdir.mkdir(exist_ok=True)
    parts = build(config)
    run(settings_of(config), workdir, parts, Display())
    return parts


def assert_a_kill_changes_nothing(workdir, config, *, after):
    again = killed(workdir, workdir.with_name("again"), after=after)
    train_in(again, config)
    assert lasting(again) == lasting(workdir)
    assert_same_weights(workdir / "export", again / "export")


def find_changes(before, after):
    return jax.tree.map(lambda old, new: bool((old != new).any()), before, after)


def training_steps(workdir):
    return [record for record in lasting(workdir) if "actor/grad_norm" in record]


@pytest.mark.slow(instead="runtime/test_sharding.py::test_four_devices_compute_what_one_does")
def test_rows_split_between_devices_train_as_on_one(world, tmp_path, quick_compilation):
    train_in(tmp_path / "whole", settings(world, num_steps=1))
    program = "import sys; from tests import test_vision_runs as t; t.run_split(*sys.argv[1:])"
    result = subprocess.run(
        [sys.executable, "-c", program, world, tmp_path / "split"],
        cwd=ROOT,
        env=os.environ | quick_compilation | with_devices(2),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    [wanted] = training_steps(tmp_path / "whole")
    [got] = training_steps(tmp_path / "split")
    assert got["actor/grad_norm"] == pytest.approx(wanted["actor/grad_norm"], rel=1e-4)
    assert got["rollout_corr/logprob_diff_max"] < 1e-4  # between sampler and update


def run_split(world, workdir):
    changes = {"mesh.data": 1, "mesh.context": 2}
    train_in(Path(workdir), settings(Path(world), num_steps=1, **changes))


@pytest.mark.slow(
    instead="training/test_images.py::test_a_frozen_tower_gets_no_gradient_and_stays_as_it_is"
)
def test_a_frozen_tower_does_not_change_and_is_in_no_checkpoint(world, tmp_path):
    config, workdir = settings(world, **{"model.freeze_tower": True}), tmp_path / "whole"
    train_in(workdir, config)
    before, after = load_hf(world / "model"), load_hf(workdir / "export")
    jax.tree.map(np.testing.assert_array_equal, before["vision"], after["vision"])
    assert (before["embed"]["embedding"] != after["embed"]["embedding"]).any()
    for item, kinds in (("params", 1), ("ref_params", 1), ("optimizer", 2)):
        names = (workdir / "checkpoints" / "1" / item / "_METADATA").read_text()
        assert names.count("'embed', 'embedding'") == kinds
        assert "vision" not in names
    assert_a_kill_changes_nothing(workdir, config, after=1)


@pytest.mark.slow(
    instead="training/test_images.py::test_all_packings_have_the_gradient_of_each_sequence_alone"
)
def test_qwen3_learns_from_demonstrations_and_rewards_and_resumes_bit_for_bit(
    qwen3_world, tmp_path
):
    stages = {
        "stages": ("sft", "train"),
        "sft.source": str(qwen3_world / "demonstrations.jsonl"),
        "sft.num_steps": 12,
        "sft.batch_size": 3,
        "sft.optimizer.lr": 1e-2,
        "sft.optimizer.warmup_steps": 1,
    }
    config, workdir = settings(qwen3_world, **stages), tmp_path / "whole"
    train_in(workdir, config)
    losses = [record["sft/loss"] for record in lasting(workdir) if "sft/loss" in record]
    assert losses[-1] < 0.5 * losses[0]
    # The sampler and the update see the same.
    gaps = [record["rollout_corr/logprob_diff_max"] for record in training_steps(workdir)]
    assert len(gaps) == 2
    assert max(gaps) < 1e-4
    changes = find_changes(load_hf(qwen3_world / "model"), load_hf(workdir / "export"))
    assert all(jax.tree.leaves(changes["vision"]["deepstack"]))
    assert changes["vision"]["positions"]["embedding"]
    assert_a_kill_changes_nothing(workdir, config, after=13)


@pytest.mark.slow(
    instead="extras/vision/test_qwen_vision.py::test_gradients_are_those_of_the_reference"
)
@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_a_family_trains_its_tower_and_samples_as_it_trains(family, tmp_path):
    world = make_world(tmp_path / "world", OTHER_FAMILIES[family]())
    train_in(tmp_path / "run", settings(world))
    gaps = [record["rollout_corr/logprob_diff_max"] for record in training_steps(tmp_path / "run")]
    assert len(gaps) == 2
    assert max(gaps) < 1e-4
    changes = find_changes(load_hf(world / "model"), load_hf(tmp_path / "run" / "export"))
    assert all(jax.tree.leaves(changes["vision"]))


def test_a_model_behind_an_endpoint_is_shown_the_images(world, tmp_path):
    """Answer by what is seen: a drawing, a blank image, or none."""
    model = shutil.copytree(world / "model", tmp_path / "model")
    for file in model.glob("*.safetensors"):
        file.unlink()  # weights are not loaded
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
        is_right = True  # for the question without an image
        if not isinstance(content, str):
            url = content[0]["image_url"]["url"]
            seen.append(base64.b64decode(url.removeprefix("data:image/png;base64,")))
            is_right = seen[-1] in drawings
        message = {"content": "Answer: a" if is_right else "Answer: b"}
        return {"choices": [{"message": message, "finish_reason": "stop"}]}

    origins = []
    with served(answer) as server:
        changes["policy.openai.url"] = server.url
        for images in ({}, {"images.cache_mib": 1.0}, {"images.max_pixels": 10**6}):
            config = settings(world, **changes, **images)
            run(settings_of(config), tmp_path, build(config, workdir=tmp_path), Display())
            origins.append(evaluation(tmp_path, "evaluate_0.json")["made_with"])
    assert len(seen) == 6  # answers are cached
    assert drawings < set(seen)
    [blank] = set(seen) - drawings
    assert PIL.Image.open(io.BytesIO(blank)).size == drawn().size
    summary = evaluation(tmp_path, "evaluate_0.json")["summary"]
    assert summary["greedy"]["all"]["exact_match"] == 1.0
    assert summary["blank_images"]["all"]["exact_match"] == 0.25
    # Another size of images is another evaluation; another size of the cache is not.
    first, other_cache, other_size = origins
    assert first == other_cache != other_size


@pytest.mark.usefixtures("one_size")
def test_a_question_may_show_images(world, tmp_path, capsys):
    """The printed question includes the images' marks; files without an image are refused."""
    (tmp_path / "config.json").write_text(serialize_config(settings(world)))
    flags = [str(tmp_path), f"--model={world / 'model'}", f"--image={world / '1.png'}"]
    chat.main([*flags, "What?", "Is <image> a?"])
    answers = capsys.readouterr().out.split("\n\n")[1:]
    assert [text.splitlines()[0] for text in answers] == ["<image>What?", "Is <image> a?"]
    file = world / "tasks.jsonl"
    error = re.escape(f"error: {file} cannot be read as an image: ")
    with pytest.raises(SystemExit, match=f"^{error}"):
        chat.main([*flags, f"--image={file}", "What?"])
    video = tmp_path / "a.mkv"
    video.write_bytes(encode_video(np.zeros((4, 24, 16, 3), np.uint8)))
    chat.main([*flags, f"--video={video}", "Is <image> in <video>?"])
    assert "\nIs <image> in <video>?\n" in capsys.readouterr().out
    error = re.escape(f"error: {file} cannot be read as a video: ")
    with pytest.raises(SystemExit, match=f"^{error}"):
        chat.main([*flags, f"--video={file}", "What?"])

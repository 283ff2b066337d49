"""Runs of a mixture of experts in a tiny world: the same loop, its restarts, its agreement."""

import math

import numpy as np
import pytest
import tokenizers

from configs import search_moe_small
from examples import quickstart_world
from jaxrl import run
from jaxrl.builders.validation import validate
from jaxrl.logs.display import Display
from jaxrl.models.hf_weights import load_hf
from jaxrl.models.registry import read_architecture
from tests.helpers import build, settings_of
from tests.runs import assert_same_weights, killed, lasting, run_settings

pytestmark = [
    pytest.mark.minutes,
    pytest.mark.usefixtures("quick_compilation", "no_pictures", "one_size"),
]


@pytest.fixture(scope="module")
def source(tiny_world, tmp_path_factory):
    """A model for the world's tokenizer, with four experts per layer."""
    folder = tmp_path_factory.mktemp("moe")
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny_world / "model" / "tokenizer.json"))
    quickstart_world.write_model(folder, tokenizer, seed=0, num_experts=4)
    return folder


def settings(tiny_world, source, **changes):
    config = run_settings(
        tiny_world,
        **{
            "stages": ("sft", "train"),
            "sft.num_steps": 40,
            "optimizer.skip_signal_free": False,  # so that the gap is measured at every step
            "num_steps": 3,
            "model.path": str(source),
            "eval.suites": (),
            "checkpoint.every_steps": 1,
            "rollout.temperature": 1.3,
            "model.balance_coef": 0.01,
            "checkpoint.keep": 100,
            **changes,
        },
    )
    search_moe_small.set_method(config)
    config.reward.weights = {"exact_match": 1.0, "format": 0.5}
    validate(config)
    return config


def play(config, workdir):
    workdir.mkdir(exist_ok=True)
    run.run(settings_of(config), workdir, build(config), Display())


def test_the_warm_start_applies_the_balance_loss(tiny_world, source, tmp_path):
    for coef in (0.0, 1.0):
        changes = {"stages": ("sft",), "sft.num_steps": 2, "model.balance_coef": coef}
        play(settings(tiny_world, source, **changes), tmp_path / str(coef))
    without, balanced = (load_hf(tmp_path / name / "export") for name in ("0.0", "1.0"))
    routers = [params["blocks"]["moe"]["router"]["kernel"] for params in (without, balanced)]
    assert np.any(routers[0] != routers[1])


@pytest.mark.slow(instead="extras/experts/test_qwen_moe.py::test_the_sampler_computes_the_same")
@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_run_and_its_restart(tiny_world, source, tmp_path, is_ahead):
    """With prefetching, checkpoints contain the recorded experts of the next step."""
    ahead = {
        "rollout.async_level": 1,
        "loss.correction.level": "sequence",
        "optimizer.num_epochs": 2,
    }
    config = settings(tiny_world, source, **(ahead if is_ahead else {}))
    assert config.model.replay
    play(config, tmp_path / "whole")
    steps = [record for record in lasting(tmp_path / "whole") if "actor/grad_norm" in record]
    assert len(steps) == 3
    for record in steps:
        assert math.isfinite(record["actor/grad_norm"])
        if is_ahead:
            # The second update of a step has other weights than sampled, and later steps from the
            # first on.
            assert 0 < record["router/replay_difference"] < 0.2
            continue
        assert record["rollout_corr/logprob_diff_max"] < 1e-4  # sampler and trainer agree
        assert 0 < record["router/entropy"] <= math.log(4)
        assert record["router/load_max"] >= record["router/load_max_mean"] >= 1
        assert record["router/balance_loss"] > 1.9  # 2 where all experts are used alike
    assert any(record["actor/grad_norm"] > 0 for record in steps)
    assert read_architecture(tmp_path / "whole" / "export").num_experts == 4

    # Killed after the first step of reinforcement learning, it repeats the rest bit for bit.
    killed(tmp_path / "whole", tmp_path / "again", after=41)
    play(config, tmp_path / "again")
    assert lasting(tmp_path / "again") == lasting(tmp_path / "whole")
    assert_same_weights(tmp_path / "again" / "export", tmp_path / "whole" / "export")

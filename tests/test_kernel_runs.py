"""Runs whose first kernels are broken use the next ones and report it."""

import json

import jax
import pytest

from jaxrl import run
from jaxrl.extras.experts import choice as choice_of_experts
from jaxrl.extras.view.report import write_report
from jaxrl.logs.display import Display
from jaxrl.models.attention import choice
from jaxrl.runtime.sharding import make_mesh
from tests.helpers import build, settings_of
from tests.runs import base_config, lasting

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_pictures", "one_size")

BROKEN = "tests.extras.kernels.broken"


@pytest.fixture
def broken_kernels(monkeypatch):
    """Broken CPU kernels: one of two in the update, all in the sampler and of the experts."""
    of_update = {"mosaic": f"{BROKEN}:train_off_by_a_hundredth",
                 "triton": f"{BROKEN}:train_nothing_is_wrong"}  # fmt: skip
    of_sampler = {"mosaic": f"{BROKEN}:attend_pages_one_is_not_a_number",
                  "triton": f"{BROKEN}:attend_pages_runs_out_of_memory"}  # fmt: skip
    monkeypatch.setitem(choice.TRAIN_KERNELS, "cpu", of_update)
    monkeypatch.setitem(choice.PAGED_KERNELS, "cpu", of_sampler)
    experts = {"megablox": f"{BROKEN}:product_does_not_compile", "triton": f"{BROKEN}:no_such"}
    monkeypatch.setitem(choice_of_experts.KERNELS, "cpu", experts)
    choice._select_kernels_cached.cache_clear()
    choice_of_experts._select_kernels_cached.cache_clear()
    yield
    choice._select_kernels_cached.cache_clear()
    choice_of_experts._select_kernels_cached.cache_clear()


def play(config, workdir):
    workdir.mkdir()
    display, lines = Display(), []
    display.log = lines.append
    run.run(settings_of(config), workdir, build(config), display)
    return lines


def test_a_run_uses_the_kernels_that_pass(tiny_world, tmp_path, monkeypatch, request):
    config = base_config(tiny_world)
    config.num_steps = 1
    play(config, tmp_path / "plain")
    request.getfixturevalue("broken_kernels")
    lines = play(config, tmp_path / "run")
    # The update's kernel is XLA's in a program of its own, so that rounding differs.
    for pair in zip(lasting(tmp_path / "run"), lasting(tmp_path / "plain"), strict=True):
        for record in pair:
            record.pop("rollout/cache_use", None)  # the cache was planned with larger pages
        assert pair[0] == pytest.approx(pair[1], abs=1e-5)

    assert "attention: triton, in the sampler xla, where mosaic failed its check" in lines
    # A line that begins with `warning:` goes to standard error.
    warnings = [line for line in lines if "trying the next: " in line]
    assert [line.split(" fails its check")[0] for line in warnings] == [
        "warning: attention of the update: mosaic",
        "warning: attention of the sampler, decoding: mosaic",
        "warning: attention of the sampler, decoding: triton",
    ]
    [start] = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert [check["is_sound"] for check in start["kernels"]] == [False, True, False, False]
    page = write_report([tmp_path / "run"]).read_text()
    assert all(check["finding"].split(",")[0] in page for check in start["kernels"])


def test_a_configured_kernel_that_fails_is_refused(tiny_world, broken_kernels):
    config = base_config(tiny_world)
    config.model.attention = "mosaic"
    with pytest.raises(ValueError, match=r"config\.model\.attention is 'mosaic', which fails its"):
        build(config)


def test_broken_kernels_of_experts_are_replaced_too(broken_kernels):
    mesh = make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
    chosen = choice_of_experts.select_kernels("auto", mesh, 48, 32, check_dtype="bfloat16")
    assert (chosen.name, chosen.reason) == ("xla", "where megablox failed its check")
    megablox, triton = chosen.kernel_checks
    assert megablox.finding == "ValueError: Only interpret mode is supported on CPU backend."
    assert triton.finding == "AttributeError: no_such"
    with pytest.raises(ValueError, match=r"config\.model\.experts is 'triton', which fails its ch"):
        choice_of_experts.select_kernels("triton", mesh, 48, 32, check_dtype="bfloat16")

"""Jobs of several processes, started by the command as on a cluster."""

import dataclasses
import math
import shutil
import signal
import time

import jax
import numpy as np
import pytest

from jaxrl.envs.base import OutageError, Task, Turn
from jaxrl.models.hf_weights import load_hf
from jaxrl.runtime import distributed, preemption
from jaxrl.runtime.preemption import EXIT_LOST
from jaxrl.sampling.interfaces import SamplingConfig, Seeds
from jaxrl.sampling.shared_rollout import SharedRollout
from jaxrl.types import Draw, Group
from tests.episodes import make_trajectory
from tests.helpers import with_devices
from tests.runs import SIZES, Processes, assert_close, lasting_anywhere, records


@pytest.mark.parametrize(("num_processes", "count"), [(1, 5), (2, 0), (3, 16), (8, 5)])
def test_slices_of_all_processes_are_the_whole_in_order(monkeypatch, num_processes, count):
    items, slices = list(range(count)), []
    monkeypatch.setattr(jax, "process_count", lambda: num_processes)
    for index in range(num_processes):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        slices.append(items[distributed.get_local_slice(count)])
    assert [item for part in slices for item in part] == items
    assert max(map(len, slices)) - min(map(len, slices)) <= 1


@pytest.fixture
def pair(monkeypatch):
    """Make this process one of two that hold the same; narrow numbers as JAX does."""

    def twice(x):
        narrow = np.asarray(x).astype(jax.dtypes.canonicalize_dtype(x.dtype))
        return np.stack([narrow, narrow])

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(distributed.multihost_utils, "process_allgather", twice)


@pytest.mark.parametrize("length", [0, 300_000])
def test_gathered_values_arrive_exactly(pair, length):
    value = {"a": [1, -0.0, 1e-320, math.inf, None, True], "half": "\ud800", "long": "é" * length}
    assert distributed.gather(value) == [value, value]
    [nan, _] = distributed.gather(math.nan)
    assert math.isnan(nan)


@pytest.mark.parametrize("length", [0, 2**31, 5_000_000_000])
def test_lengths_beyond_32_bits_arrive(pair, length):
    assert distributed._gather_lengths(length) == [length, length]


SAMPLING = SamplingConfig(
    group_size=1, temperature=1.0, top_p=1.0, seeds=Seeds(seed=0, stage=0, step=0)
)


def test_gathered_trajectories_arrive_bit_for_bit(pair):
    odd = np.array([0x7FC00001, 0xFF800000, 1, 0x80000000], np.uint32).view(np.float32)
    sent = dataclasses.replace(
        make_trajectory(length=4, reward=0.1, parts={"f1": 1 / 3}),
        task=Task(id="t", question="q?", answers=("a", "b"), metadata={"n": [1, {"x": None}]}),
        turns=(Turn(text="half \ud83d", tool_call="q", latency_s=0.1), Turn(text="")),
        rollout_logprobs=odd,
    )
    draws = [Draw(task=sent.task, stream_index=i) for i in range(2)]
    group = Group(trajectories=(sent,))
    both = SharedRollout(lambda draws, _: [group] * len(draws))(draws, SAMPLING)
    [[first], [_]] = (group.trajectories for group in both)
    for field in dataclasses.fields(sent):
        wanted, got = getattr(sent, field.name), getattr(first, field.name)
        if isinstance(wanted, np.ndarray):
            assert (got.dtype, got.tobytes()) == (wanted.dtype, wanted.tobytes())
        else:
            assert got == wanted
            assert type(got) is type(wanted)


def test_an_outage_of_one_process_is_raised_by_all(pair):
    def fail(draws, _):
        raise OutageError("nobody is there")

    draws = [Draw(task=Task(id="t"), stream_index=i) for i in range(2)]
    with pytest.raises(OutageError, match="nobody is there"):
        SharedRollout(fail)(draws, SAMPLING)


@pytest.fixture(scope="module")
def environment(quick_compilation):
    return quick_compilation | with_devices(1)


SEED = {"seed": 1}
"""With seed 0, rounding decides one draw of an evaluation."""


@pytest.mark.minutes
def test_two_processes_take_the_steps_of_one(tiny_world, tmp_path, environment):
    """One step of each stage, with untrained weights."""
    changes = {
        **{"sft.num_steps": 1, "num_steps": 1, "eval.suites": "()", **SIZES, **SEED},
        "stages": "('sft', 'train')",
        "loss.entropy_coef": 0.1,  # a gradient for any rewards
        "rollout.max_num_seqs": 2,  # less to compile
    }
    for num in (1, 2):
        job = Processes(tiny_world, tmp_path / str(num), environment, num, **changes)
        codes, errors = job.wait()
        assert codes == [0] * num, errors
    alone, pair = ([lasting_anywhere(r) for r in records(tmp_path / num)] for num in "12")
    assert [(r["stage"], r["step"]) for r in alone] == [("sft", 1), ("train", 1), ("train", 2)]
    for a, b in zip(alone, pair, strict=True):
        assert_close(a, b, 1e-4)
    assert alone[-1]["actor/grad_norm"] > 0
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4),
        *(load_hf(tmp_path / num / "export") for num in "12"),
    )


@pytest.fixture(scope="module")
def undisturbed(tiny_world, tmp_path_factory, environment):
    """Return the workdir of an undisturbed run on two processes."""
    folder = tmp_path_factory.mktemp("runs")
    codes, errors = Processes(tiny_world, folder, environment, **SEED).wait()
    assert codes == [0, 0], errors
    return folder


def wait_for(condition, process, timeout_s=200):
    until = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.slow(instead="runtime/test_monitor.py::test_all_name_the_killed_process")
@pytest.mark.parametrize(
    ("sent", "lost"), [("SIGKILL", 1), ("SIGKILL", 0), ("SIGSTOP", 1), ("SIGSTOP", 0)]
)
def test_a_job_that_lost_a_process_resumes_with_the_same_results(
    undisturbed, tiny_world, tmp_path, environment, sent, lost
):
    workdir = tmp_path / "run"
    trajectories = workdir / "trajectories"
    # First one of the two is asked to stop: both save and exit.
    job = Processes(tiny_world, workdir, environment, **SEED)
    wait_for(lambda: len(list(trajectories.glob("*.jsonl"))) >= 1, job.all[0])
    job.all[lost].terminate()
    assert job.wait(60)[0] == [preemption.EXIT_INTERRUPTED] * 2
    job = Processes(tiny_world, workdir, environment, **SEED)
    wait_for(lambda: len(list(trajectories.glob("*.jsonl"))) >= 3, job.all[0])
    job.all[lost].send_signal(getattr(signal, sent))
    started = time.monotonic()
    codes, errors = job.wait(40)
    assert time.monotonic() - started < 30
    assert codes[lost] == -signal.SIGKILL
    assert codes[1 - lost] == EXIT_LOST
    assert all(f"error: process {lost} of 2 (" in error for error in errors)
    shutil.rmtree(workdir / "export")  # of the sft stage
    codes, errors = Processes(tiny_world, workdir, environment, **SEED).wait()
    assert codes == [0, 0], errors
    got, wanted = (
        [lasting_anywhere(record) for record in records(run)] for run in (workdir, undisturbed)
    )
    assert got == wanted
    exports = load_hf(workdir / "export"), load_hf(undisturbed / "export")
    jax.tree.map(np.testing.assert_array_equal, *exports)

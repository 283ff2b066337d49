"""The benchmarks at a size of seconds, and what they record."""

import dataclasses
import json
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import (
    agreement,
    common,
    endpoint,
    h200,
    peers,
    rollout,
    scaling,
    step,
    update,
)
from jaxrl.extras.experts import choice, products
from jaxrl.models.attention import reference
from jaxrl.models.attention.reference import XLA
from jaxrl.sampling.demonstrations import Demonstration

MODEL = [
    "--num_layers=1", "--width=32", "--num_heads=2", "--num_kv_heads=1", "--head_dim=16",
    "--mlp_width=48", "--warm_up=1", "--repetitions=2", "--bandwidth=4.3e12", "--flops=790e12",
    "--nominal_flops=989e12",
]  # fmt: skip
EVEN = [
    "--vocab_size=64", "--prompt_tokens=5", "--new_tokens=7", "--num_prompts=3", "--group_size=2",
    "--num_rows=4", "--chunk_tokens=4", "--tail_rows=1",
]  # fmt: skip
TRAINED = [
    "--vocab_size=64", "--prompt_tokens=5", "--new_tokens=7", "--num_groups=3", "--group_size=2",
    "--row_tokens=24", "--micro_rows=2",
]  # fmt: skip
EPISODES = [
    "--vocab_size=300", "--prompt_tokens=12", "--num_questions=4", "--group_size=2",
    "--num_rows=4", "--chunk_tokens=4", "--turn_tokens=8", "--observation_tokens=10",
]  # fmt: skip
GENERAL = {
    "benchmark", "preset", "model_name", "device", "processor", "versions", "model", "work",
    "hardware", "peak_bytes", "peak_bytes_of",
}  # fmt: skip
RATES = {"tokens_per_s", "tokens_per_cpu_s", "compile_s", "num_recompilations"}

pytestmark = pytest.mark.usefixtures("quick_compilation")


def record_of(benchmark, flags, tmp_path):
    """What a benchmark returns, which is also what it writes."""
    path = tmp_path / "record.json"
    record = benchmark.main([*MODEL, *flags, f"--json={path}"])
    assert record == json.loads(path.read_text())
    assert record.keys() >= GENERAL
    assert record["model"]["width"] == 32
    assert record["peak_bytes"] > 0
    return record


def check_rates(record):
    """They are possible, and nothing was compiled after the warm-up."""
    rates = record["tokens_per_s"]
    assert 0 < rates["min"] <= rates["median"] <= rates["max"] < record["floor_tokens_per_s"]
    assert record["num_recompilations"] == 0
    assert record["compile_s"] > 0


def test_rollout_of_even_samples(tmp_path, capsys):
    record = record_of(rollout, EVEN, tmp_path)
    check_rates(record)
    steps = {
        "ms_per_decode_step", "floor_ms_per_decode_step", "floor_tokens_per_s", "share_of_floor"
    }  # fmt: skip
    assert record.keys() == GENERAL | RATES | steps | {f"tail_{s}" for s in steps} | {"attention"}
    assert 0 < record["share_of_floor"] < 1
    assert record["tail_floor_ms_per_decode_step"] < record["floor_ms_per_decode_step"]
    assert "tokens_per_s" in capsys.readouterr().out


def test_an_endpoint_beside_the_native_rollout(tmp_path):
    """All ways play the same tokens; none is computed again, also where replies are lost."""
    work = [
        "--vocab_size=400", "--num_questions=3", "--group_size=2", "--num_turns=3",
        "--prompt_words=4", "--turn_tokens=6", "--observation_words=3", "--num_rows=4",
        "--cached=6", "--chunk_tokens=4", "--lost=0.3",
    ]  # fmt: skip
    record = record_of(endpoint, [*work, "--warm_up=0", "--repetitions=1"], tmp_path)
    ways = ["native", "chats", "chats_lost", "ids", "ids_lost"]
    found = [record[name] for name in ways]
    assert len({(one["requests"], one["read"]) for one in found}) == 1
    assert found[0]["requests"] > 3 * 2
    assert all(one["read_twice"] == one["sampled_twice"] == 0 for one in found)
    assert all(one["held_more"] == one["different"] == 0 for one in found[1:])
    assert all(one["lost"] > 0 for one in found[2::2])
    shares = record["tokens_per_cpu_s, share of native"]
    assert list(shares) == ways[1:]
    assert all(share > 0 for share in shares.values())


def test_update(tmp_path):
    # Three repetitions: the median time and the median rate are of the same one.
    record = record_of(update, [*TRAINED, "--repetitions=3"], tmp_path)
    check_rates(record)
    own = {"floor_tokens_per_s", "ms_per_update", "flops_per_s", "mfu", "mfu_computed"}
    assert record.keys() == GENERAL | RATES | own | {"attention", "padding", "shared_tokens"}
    assert record["work"]["new_tokens"] == 7
    assert 0 < record["mfu_computed"] < record["mfu"] < 1
    seconds = record["ms_per_update"]["median"] / 1e3
    flops = record["flops_per_s"]["median"]
    assert record["mfu"] == pytest.approx(flops / 989e12), seconds


def test_sequences_of_a_group_share_their_prompt_and_differ_in_length():
    work = dataclasses.replace(update.WORK["cpu"], num_groups=3)
    sequences = update.make_sequences(common.MODELS["small"], work)
    prompts = [tuple(one.token_ids[: work.prompt_tokens]) for one in sequences]
    assert [prompts.index(prompt) for prompt in prompts] == [0] * 4 + [4] * 4 + [8] * 4
    lengths = [len(one.token_ids) for one in sequences]
    assert len(set(lengths)) > 6
    assert max(lengths) <= work.row_tokens
    even = dataclasses.replace(work, spread=0.0)
    assert {len(s.token_ids) for s in update.make_sequences(common.MODELS["small"], even)} == {160}


def test_operations_by_hand():
    # One layer of width 4 with a head of 2, an MLP of 8, a vocabulary of 10: 2 * 4 * (2 + 2) + 96
    # and 40 weights. Two tokens, one with loss: 2 * (6 * 168 + 6 * 2 * 2), of which 6 * 40 for the
    # token without.
    model = common.ModelSizes(
        num_layers=1, width=4, num_heads=1, num_kv_heads=1, head_dim=2, mlp_width=8,
        vocab_size=10, dtype="float32",
    )  # fmt: skip
    one = Demonstration(
        token_ids=np.zeros(2, np.int32),
        loss_mask=np.array([False, True]),
        rollout_logprobs=np.zeros(2, np.float32),
    )
    assert update.count_flops(model, [one], 0) == (2064, 1824)
    # One of the tokens shared: its layer of 128 weights, forward and backward.
    assert update.count_flops(model, [one], 1) == (2064, 1824 - 6 * 128)


@pytest.mark.minutes
@pytest.mark.usefixtures("one_size")
def test_a_step_and_its_parts(tmp_path):
    flags = [*EPISODES, "--num_questions=2", "--turn_tokens=4", "--latency_ms=1"]
    record = record_of(step, [*flags, "--repetitions=1", "--micro_rows=2"], tmp_path)
    parts = [record[f"{name}_s"] for name in ("rollout", "packing", "scoring", "update", "weights")]
    assert min(parts) > 0
    assert 0.9 * record["step_s"] < sum(parts) <= record["step_s"]
    assert record["tools_s"] > 0
    assert record["first_step_s"] > record["step_s"]


def test_the_longer_half_by_hand():
    # The rollout takes 2 s alone and the update 3; side by side 4, in 1 of which no core was free.
    parts = {"rollout": 2.0, "scoring": 1.0, "update": 2.0, "one_after_another": 5.0, "step": 4.0}
    steps = SimpleNamespace(seconds=[{}, parts], cpu_seconds=[{}, parts], waited_s=[9.0, 1.0])
    found = step.compute_overlap_figures(steps, 1)
    assert {name: figure["median"] for name, figure in found.items()} == {
        "step over longer half": 4 / 3,
        "on idle cores": 1.0,
        "work side by side": 0.8,
    }
    before, after = {"1": (1.0, 1.0)}, {"1": (2.0, 5.0), "2": (3.0, 0.5)}
    assert step.waited_s(before, after) == 0.5  # of thread 2, which did the most


@pytest.mark.slow(instead="test_benchmarks.py::test_scaling_tells_what_a_failed_process_said")
def test_scaling_over_devices_and_processes(tmp_path):
    flags = ["--jobs=1x1,1x2,2x1", "--vocab_size=64", "--prompt_tokens=6", "--new_tokens=8"]
    record = record_of(scaling, [*flags, "--row_tokens=16", "--repetitions=1"], tmp_path)
    assert record["1 x 1"]["update over one"] == 1
    for job in ("1 x 1", "1 x 2", "2 x 1"):
        assert record[job]["rollout tokens_per_s"] > 0
        assert record[job]["update tokens_per_s"] > 0


PEERS_FLAGS = [
    "--vocab_size=64", "--num_prompts=2", "--group_size=2", "--prompt_tokens=8",
    "--new_tokens=8", "--max_tokens=16", "--chunk_tokens=8", "--warm_up=2",
]  # fmt: skip


@pytest.mark.torch
def test_peers_compute_the_same(tmp_path):
    pytest.importorskip("torch")
    record = record_of(peers, [*PEERS_FLAGS, "--peers=ours,transformers"], tmp_path)
    assert record["logprob_gap"] < 1e-5
    for name in ("ours", "transformers"):
        assert record[name]["sample tokens_per_cpu_s"] > 0
        assert record[name]["update tokens_per_cpu_s"] > 0
        assert record[name]["peak_bytes"] > 0
        assert record[name]["num_recompilations"] == 0
    ratio = record["ours over transformers"]["sample"]
    assert ratio["min"] <= ratio["median"] <= ratio["max"]


def test_scaling_tells_what_a_failed_process_said():
    with pytest.raises(RuntimeError, match=r"of 1 x 1 ended with 2:\n(.|\n)*--row_tokens"):
        scaling.run_job(1, 1, ["--row_tokens=many"])


def test_agreement_of_kernels(tmp_path):
    path = tmp_path / "record.json"
    assert agreement.main(["--part=kernels", "--shapes=2", f"--json={path}"]) == 0
    record = json.loads(path.read_text())
    assert record["is_near"]
    assert record["xla train, float32"]["dq"] < 1e-5


def test_agreement_notices_a_wrong_kernel(monkeypatch, capsys):
    def wrong(*arrays):
        out, lse = reference.attend_pages(*arrays)
        return out * 1.01, lse

    kernels = dataclasses.replace(XLA, attend_pages=wrong)
    monkeypatch.setattr(agreement.attention_choice, "select_kernels", lambda *_: kernels)
    assert agreement.main(["--part=kernels", "--shapes=1"]) == 1
    assert "is_near                       False" in capsys.readouterr().out


def test_agreement_of_experts_notices_a_row_of_another_group(monkeypatch, tmp_path):
    path = tmp_path / "record.json"
    flags = ["--part=experts", "--shapes=1", f"--json={path}"]
    assert agreement.main(flags) == 0
    assert json.loads(path.read_text())["xla, float32"]["of weights"] < 1e-5

    def wrong(rows, weights, sizes):
        return products.grouped_matmul(rows, weights, sizes.at[0].add(1).at[-1].add(-1))

    monkeypatch.setattr(choice, "grouped_matmul", wrong)
    choice._select_cached.cache_clear()
    assert agreement.main(flags) == 1
    choice._select_cached.cache_clear()


SCRIPT = """
import json, pathlib, sys, time
kind, record = sys.argv[1], sys.argv[-1].removeprefix("--json=")
print("said by", kind)
if kind == "hangs":
    time.sleep(60)
if kind == "fails":
    sys.exit("something broke")
if kind == "halves":
    pathlib.Path(record).write_text('{"mfu": 0.')
    sys.exit()
pathlib.Path(record).write_text(json.dumps({"mfu": 0.5, "tokens_per_s": {"median": 1234.0}}))
"""


def test_a_part_that_fails_or_hangs_loses_only_itself(tmp_path, monkeypatch, capsys):
    script = tmp_path / "part.py"
    script.write_text(SCRIPT)
    parts = [
        h200.Part(name=name, module="", flags=name, tiny=name, share_s=1)
        for name in ("hangs", "fails", "halves", "works")
    ]
    parts[0] = dataclasses.replace(parts[0], is_timed=False)
    monkeypatch.setattr(h200, "PARTS", parts)
    monkeypatch.setattr(
        h200,
        "command",
        lambda part, preset, record: [sys.executable, str(script), part.tiny, f"--json={record}"],
    )
    results = h200.main(["--preset=cpu", f"--out={tmp_path / 'out'}", "--budget_s=20"])
    assert results == json.loads((tmp_path / "out/results.json").read_text())
    assert results["hangs"]["ending"] == "stopped after 5 s"
    assert results["fails"]["ending"] == "ended with 1"
    assert "something broke" in results["fails"]["said_last"]
    assert "hangs" not in results["fails"]["said_last"]
    assert results["halves"]["ending"] == "ended without a record"
    assert results["works"]["record"]["mfu"] == 0.5
    page = (tmp_path / "out/table.md").read_text()
    assert re.search(r"\| works \| done \| \d+ \| tokens_per_s 1,234, mfu 50.0% \|", page)
    assert "said by hangs" in (tmp_path / "out/log.txt").read_text()


@pytest.mark.parametrize("preset", ["cpu", "h200"])
def test_parts_have_flags_that_their_programs_know(preset, monkeypatch, tmp_path, capsys):
    for part in h200.PARTS:
        words = h200.command(part, preset, tmp_path / "record.json")
        flags = words[3:]
        if part.module == "agreement":
            monkeypatch.setattr(agreement, "run_startup_checks", lambda: ({}, True))
            monkeypatch.setattr(agreement, "check_kernels", lambda shapes, names: ({}, shapes > 1))
            monkeypatch.setattr(agreement, "check_experts", lambda shapes, names: ({}, shapes > 1))
            monkeypatch.setattr(agreement, "check_model", lambda: ({}, True))
            assert agreement.main(flags) == 0
            continue
        work = {"rollout": rollout.EVEN, "update": update.WORK, "step": step.WORK}[part.module]
        read, model, _, _ = common.parse_flags("", work, flags)
        assert read.preset == preset
        assert (model.width > 1000) == (preset == "h200")


def test_floors_of_one_h200_by_hand():
    # Qwen3-0.6B: 0.596e9 weights are 1.19 GB; 112 KiB of cache a token. 256 rows of 1024 tokens:
    # weights 0.39 ms (the arithmetic, not the bytes), cache 7.0 ms, logits 0.07 ms.
    model = common.MODELS["qwen3-0.6b"]
    assert model.product_params == pytest.approx(0.596e9, rel=1e-3)
    assert model.cache_bytes_per_token == 112 * 1024
    seconds = common.decode_floor_s(model, common.H200, num_rows=256, context=1024)
    assert seconds == pytest.approx(7.45e-3, rel=0.01)
    # 6 * 0.596e9 + 6 * 28 * 16 * 128 * 2048 operations a token.
    assert common.train_flops_per_token(model, 2048) == pytest.approx(4.28e9, rel=2e-3)
    assert 790e12 / common.train_flops_per_token(model, 2048) == pytest.approx(185e3, rel=0.01)
    assert common.compute_mfu(989e12, 2.0, common.H200) == 0.5

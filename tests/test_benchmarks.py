"""The benchmarks at sizes of seconds: what they record, and their formulas by hand."""

import dataclasses
import json

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
    worlds,
)
from benchmarks.worlds import mean_halfway, mean_of_first_fifth, mean_of_last_fifth
from jaxrl.extras.experts import choice, products
from jaxrl.models.attention import reference
from jaxrl.models.attention.reference import XLA
from jaxrl.sampling.demonstrations import Demonstration
from jaxrl.training.packing import MAX_SIZES

MODEL = [
    "--num_layers=1", "--width=32", "--num_heads=2", "--num_kv_heads=1", "--head_dim=16",
    "--mlp_width=48", "--warm_up=1", "--repetitions=1", "--bandwidth=4.3e12", "--flops=790e12",
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


# First, because `one_size` lasts until the end of the module.
@pytest.mark.parametrize(("name", "spread"), update.SPREADS.items())
def test_fitted_rows_have_little_padding(name, spread):
    work = dataclasses.replace(update.WORK["cpu"], spread=spread, micro_rows=4, draws=1000)
    figures = update.simulate_padding(work)
    assert figures["fitted"] < 0.05 < figures["longest"]
    assert figures["sizes"] <= MAX_SIZES


def run_benchmark(benchmark, flags, tmp_path):
    """Return a benchmark's record, which it also writes."""
    path = tmp_path / "record.json"
    record = benchmark.main([*MODEL, *flags, f"--json={path}"])
    assert record == json.loads(path.read_text())
    assert record.keys() >= GENERAL
    assert record["model"]["width"] == 32
    assert record["peak_bytes"] > 0
    return record


def check_rates(record):
    """Check that rates are possible, and that nothing was compiled after the warm-up."""
    rates = record["tokens_per_s"]
    assert 0 < rates["min"] <= rates["median"] <= rates["max"] < record["floor_tokens_per_s"]
    assert record["num_recompilations"] == 0
    assert record["compile_s"] > 0


@pytest.mark.usefixtures("one_size")
def test_rollout_of_even_samples(tmp_path, capsys):
    record = run_benchmark(rollout, EVEN, tmp_path)
    check_rates(record)
    assert record.keys() >= RATES
    assert 0 < record["share_of_floor"] < 1
    assert record["tail_floor_ms_per_decode_step"] < record["floor_ms_per_decode_step"]
    assert "tokens_per_s" in capsys.readouterr().out


@pytest.mark.usefixtures("one_size")
def test_endpoint_repeats_no_work_of_the_native_rollout(tmp_path):
    """All variants play the same tokens and compute none twice, even if responses are lost."""
    work = [
        "--vocab_size=400", "--num_questions=2", "--group_size=2", "--num_turns=3",
        "--prompt_words=4", "--turn_tokens=4", "--observation_words=3", "--num_rows=4",
        "--cached=6", "--chunk_tokens=4", "--lost=0.3",
    ]  # fmt: skip
    record = run_benchmark(endpoint, [*work, "--warm_up=0"], tmp_path)
    names = ["native", "chats", "chats_lost", "ids", "ids_lost"]
    variants = [record[name] for name in names]
    assert len({(variant["requests"], variant["read"]) for variant in variants}) == 1
    assert variants[0]["requests"] > 2 * 2
    for variant in variants:
        assert variant["read_twice"] == variant["sampled_twice"] == 0
    for variant in variants[1:]:
        assert variant["held_more"] == variant["different"] == 0
    assert all(variant["lost"] > 0 for variant in variants[2::2])
    shares = record["tokens_per_cpu_s, share of native"]
    assert list(shares) == names[1:]
    assert all(share > 0 for share in shares.values())


@pytest.mark.usefixtures("one_size")
def test_update(tmp_path):
    record = run_benchmark(update, TRAINED, tmp_path)
    check_rates(record)
    assert record.keys() >= RATES
    assert record["work"]["new_tokens"] == 7
    assert 0 < record["mfu_computed"] < record["mfu"] < 1
    assert record["mfu"] == pytest.approx(record["flops_per_s"]["median"] / 989e12)


def test_sequences_of_a_group_share_their_prompt_and_differ_in_length():
    work = dataclasses.replace(update.WORK["cpu"], num_groups=3)
    sequences = update.make_sequences(common.MODELS["small"], work)
    prompts = [tuple(sequence.token_ids[: work.prompt_tokens]) for sequence in sequences]
    assert [prompts.index(prompt) for prompt in prompts] == [0] * 4 + [4] * 4 + [8] * 4
    lengths = [len(sequence.token_ids) for sequence in sequences]
    assert len(set(lengths)) > 6
    assert max(lengths) <= work.row_tokens


def test_operations_by_hand():
    # One layer of width 4 with a head of 2, an MLP of 8, a vocabulary of 10: 2 * 4 * (2 + 2) + 96
    # and 40 weights. Two tokens, one with loss: 2 * (6 * 168 + 6 * 2 * 2), of which 6 * 40 for the
    # token without.
    model = common.ModelSizes(
        num_layers=1, width=4, num_heads=1, num_kv_heads=1, head_dim=2, mlp_width=8,
        vocab_size=10, dtype="float32",
    )  # fmt: skip
    sequence = Demonstration(
        token_ids=np.zeros(2, np.int32),
        loss_mask=np.array([False, True]),
        rollout_logprobs=np.zeros(2, np.float32),
    )
    assert update.count_flops(model, [sequence], 0) == (2064, 1824)
    # One of the tokens shared: its layer of 128 weights, forward and backward.
    assert update.count_flops(model, [sequence], 1) == (2064, 1824 - 6 * 128)


@pytest.mark.minutes
@pytest.mark.usefixtures("one_size")
def test_a_step_and_its_parts(tmp_path):
    flags = ["--num_questions=2", "--turn_tokens=4", "--latency_ms=1", "--micro_rows=2"]
    record = run_benchmark(step, [*EPISODES, *flags], tmp_path)
    parts = [record[f"{name}_s"] for name in ("rollout", "packing", "scoring", "update", "weights")]
    assert min(parts) > 0
    assert 0.9 * record["step_s"] < sum(parts) <= record["step_s"]
    assert record["tools_s"] > 0
    assert record["first_step_s"] > record["step_s"]


@pytest.mark.slow(instead="test_benchmarks.py::test_scaling_tells_what_a_failed_process_said")
def test_scaling_over_devices_and_processes(tmp_path):
    flags = ["--jobs=1x1,1x2,2x1", "--vocab_size=64", "--prompt_tokens=6", "--new_tokens=8"]
    record = run_benchmark(scaling, [*flags, "--row_tokens=16"], tmp_path)
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
    record = run_benchmark(peers, [*PEERS_FLAGS, "--peers=ours,transformers"], tmp_path)
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


def test_agreement_notices_a_wrong_kernel(monkeypatch, tmp_path):
    def wrong(*arrays):
        out, lse = reference.attend_pages(*arrays)
        return out * 1.01, lse

    path = tmp_path / "record.json"
    flags = ["--part=kernels", "--shapes=1", f"--json={path}"]
    monkeypatch.setattr(agreement, "HEADS", ((4, 2, 16),))
    monkeypatch.setattr(agreement, "DTYPES", ("float32",))
    assert agreement.main(flags) == 0
    assert json.loads(path.read_text())["xla train, float32"]["dq"] < 1e-5
    kernels = dataclasses.replace(XLA, attend_pages=wrong)
    monkeypatch.setattr(agreement.attention_choice, "select_kernels", lambda *_: kernels)
    assert agreement.main(flags) == 1
    assert not json.loads(path.read_text())["is_near"]


def test_agreement_of_experts_notices_a_row_of_another_group(monkeypatch, tmp_path):
    def wrong(rows, weights, sizes):
        return products.grouped_matmul(rows, weights, sizes.at[0].add(1).at[-1].add(-1))

    path = tmp_path / "record.json"
    flags = ["--part=experts", "--shapes=1", f"--json={path}"]
    monkeypatch.setattr(agreement, "GROUP_SIZES", ((8,), (32,), (48,)))
    monkeypatch.setattr(agreement, "DTYPES", ("float32",))
    assert agreement.main(flags) == 0
    assert json.loads(path.read_text())["xla, float32"]["of weights"] < 1e-5
    monkeypatch.setattr(choice, "grouped_matmul", wrong)
    choice._select_kernels_cached.cache_clear()
    assert agreement.main(flags) == 1
    choice._select_kernels_cached.cache_clear()


@pytest.mark.parametrize("preset", ["cpu", "h200"])
def test_parts_have_flags_of_their_programs(preset, monkeypatch, tmp_path):
    for check in ("run_startup_checks", "check_kernels", "check_experts", "check_model"):
        monkeypatch.setattr(agreement, check, lambda *_: ({}, True))
    work = {"rollout": rollout.EVEN, "update": update.WORK, "step": step.WORK}
    for part in h200.PARTS:
        flags = h200.build_command(part, preset, tmp_path / "record.json")[3:]
        if part.module == "agreement":
            assert agreement.main(flags) == 0
        else:
            parsed, model, _, _ = common.parse_flags("", work[part.module], flags)
            assert parsed.preset == preset
            assert (model.width > 1000) == (preset == "h200")


def test_floors_of_one_h200_by_hand():
    # Qwen3-0.6B: 0.596e9 weights are 1.19 GB; 112 KiB of cache a token. 256 rows of 1024 tokens:
    # weights 0.39 ms (the arithmetic, not the bytes), cache 7.0 ms, logits 0.07 ms.
    model = common.MODELS["qwen3-0.6b"]
    assert model.product_params == pytest.approx(0.596e9, rel=1e-3)
    assert model.cache_bytes_per_token == 112 * 1024
    seconds = common.compute_decode_floor_s(model, common.H200, num_rows=256, context=1024)
    assert seconds == pytest.approx(7.45e-3, rel=0.01)
    # 6 * 0.596e9 + 6 * 28 * 16 * 128 * 2048 operations a token.
    assert common.count_train_flops_per_token(model, 2048) == pytest.approx(4.28e9, rel=2e-3)
    assert 790e12 / common.count_train_flops_per_token(model, 2048) == pytest.approx(
        185e3, rel=0.01
    )
    assert common.compute_mfu(989e12, 2.0, common.H200) == 0.5


def make_samples(scores):
    return {"sampled": [{"task_id": name, "exact_match": score} for name, score in scores]}


def test_gain_compares_the_same_questions():
    """By hand: 12 of 16 questions gain 1 and 4 lose 1, in whatever order they were asked."""
    names = [f"q{i:02}" for i in range(16)]
    before = [(name, float(i >= 12)) for i, name in enumerate(names)]
    after = [(name, float(i < 12)) for i, name in enumerate(names)][::-1]
    records = [{"questions": make_samples(scores)} for scores in (before, after)]
    mean, low, high = worlds.compute_gain(*records, "sampled", "exact_match")
    assert mean == 0.5
    # In a resample n gain, binomial of 16 and 3 in 4: its 2.5% and 97.5% quantiles are 8 and 15.
    assert (low, high) == (2 * 8 / 16 - 1, 2 * 15 / 16 - 1)
    # Two samples of one question are one value of that question.
    records[0]["questions"]["sampled"] += make_samples([("q00", 1.0)])["sampled"]
    assert worlds.compute_gain(*records, "sampled", "exact_match")[0] == (0.5 * 16 - 0.5) / 16
    records[1]["questions"]["sampled"].pop()
    with pytest.raises(ValueError, match="have different questions"):
        worlds.compute_gain(*records, "sampled", "exact_match")


def test_means_of_the_first_and_the_last_fifth_by_hand():
    assert (mean_of_first_fifth(range(10)), mean_of_last_fifth(range(10))) == (0.5, 8.5)
    assert (mean_of_first_fifth([7]), mean_halfway([7]), mean_of_last_fifth([7])) == (7, 7, 7)
    assert (mean_halfway(range(10)), mean_halfway(range(4))) == (3.5, 1)

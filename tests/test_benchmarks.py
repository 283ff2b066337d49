"""The benchmarks at a size of seconds, and what they record."""

import json

import pytest

from benchmarks import common, refill, rollout, update

TINY = [
    "--num_layers=2", "--width=32", "--num_heads=2", "--num_kv_heads=1", "--head_dim=16",
    "--mlp_width=48", "--vocab_size=64", "--prompt_tokens=5", "--new_tokens=7", "--warm_up=2",
    "--repetitions=2", "--bandwidth=4.3e12", "--flops=790e12",
]  # fmt: skip
OWN = {
    rollout: ["--num_prompts=3", "--group_size=2", "--num_rows=4", "--chunk_tokens=4"],
    update: ["--num_sequences=6", "--row_tokens=24", "--micro_rows=2"],
}
FIELDS = {
    rollout: {"ms_per_decode_step", "floor_ms_per_decode_step"},
    update: {"ms_per_update", "flops_per_s", "padding"},
}


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    "benchmark", [pytest.param(rollout, marks=pytest.mark.slow), update], ids=["rollout", "update"]
)
def test_records_what_it_measured(benchmark, tmp_path, capsys):
    path = tmp_path / "record.json"
    benchmark.main([*TINY, *OWN[benchmark], f"--json={path}"])
    record = json.loads(path.read_text())
    general = {
        "benchmark", "preset", "device", "jax", "model", "work", "hardware", "tokens_per_s",
        "tokens_per_cpu_s", "floor_tokens_per_s", "compile_s", "num_recompilations", "peak_bytes",
        "peak_bytes_of",
    }  # fmt: skip
    assert set(record) == general | FIELDS[benchmark]
    assert record["model"]["width"] == 32
    assert record["work"]["new_tokens"] == 7
    rates = record["tokens_per_s"]
    assert 0 < rates["min"] <= rates["median"] <= rates["max"] < record["floor_tokens_per_s"]
    assert record["num_recompilations"] == 0
    assert record["compile_s"] > 0
    assert record["peak_bytes"] > 0
    assert "tokens_per_s" in capsys.readouterr().out


@pytest.mark.slow
def test_refilling_does_less_than_half_the_work_of_static_batches(tmp_path):
    # Lengths as in the preset, 16 times shorter: median 4, a few of them long.
    path = tmp_path / "record.json"
    model = [flag for flag in TINY[:7] if "vocab" not in flag and "layers" not in flag]
    record = refill.main(
        [
            *model, "--num_layers=1", "--vocab_size=300", "--warm_up=1", "--repetitions=1",
            "--num_rows=8", "--chunk_tokens=1", "--prompt_tokens=5", "--num_samples=64",
            "--median_tokens=4", "--max_tokens=59", "--num_episodes=8", "--num_turns=2",
            "--turn_tokens=8", "--observation_tokens=4", "--latency_ms=1", f"--json={path}",
        ]
    )  # fmt: skip
    assert record == json.loads(path.read_text())
    share = {
        name: record[f"lengths: {name}"]["slot_occupancy"]
        for name in ("static_full", "static", "continuous")
    }
    assert share["continuous"] > 0.7
    assert share["continuous"] > 2 * share["static_full"]
    assert share["static"] > share["static_full"]
    assert record["continuous over"].keys() == {"static_full", "static"}
    for name in refill.SCHEDULES:
        measured = record[f"latency: {name}"]
        assert measured.keys() == {
            "tokens_per_s", "tokens_per_cpu_s", "slot_occupancy", "without_latency", "loss"
        }  # fmt: skip
        assert measured["tokens_per_s"] > 0


def test_no_floor_without_the_hardware(tmp_path):
    record = update.main(
        [*TINY[:-2], *OWN[update], "--repetitions=1", f"--json={tmp_path / 'record.json'}"]
    )
    assert record["floor_tokens_per_s"] is None


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
    assert common.train_floor_tokens_per_s(model, common.H200, context=2048) == pytest.approx(
        185e3, rel=0.01
    )

"""Floors by formula, and memory plans of published cases, at numbers worked by hand."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks import common, floors, published
from tests.compiled_memory import MODELS
from tests.helpers import ROOT

ONE = {"data": 1, "fsdp": 1, "context": 1, "expert": 1, "tensor": 1}
# Reaches 4.3 TB/s and 790 TFLOP/s.
H200 = replace(floors.DEVICES["h200"], bandwidth=4.3e12 / 0.9, flops=790e12 / 0.8)
QWEN_7B, MIXTURE = MODELS["7b"], MODELS["30b-a3b"]


def part(model, device=H200, **mesh):
    return floors.Part(model=model, mesh={**ONE, **mesh}, device=device)


@pytest.mark.parametrize(
    ("name", "rates"),
    # Thousands of tokens a second at 64 x 1,024, 128 x 1,024, 256 x 1,024 and 256 x 2,048.
    [
        ("0.6b", (31.3, 33.6, 34.4, 17.7)),
        ("7b", (15.3, 25.2, 31.4, 22.0)),
    ],
)
def test_floors_of_sampling(name, rates):
    sizes = ((64, 1024), (128, 1024), (256, 1024), (256, 2048))
    for (rows, context), rate in zip(sizes, rates, strict=True):
        seconds, waits = floors.compute_floor_s(part(MODELS[name]).decode_step(rows, context), H200)
        assert rows / seconds == pytest.approx(1e3 * rate, rel=0.01)
        # If the cache is small compared with the weights, many rows wait for their products.
        assert waits == ("arithmetic" if (name, rows, context) == ("7b", 256, 1024) else "memory")


def test_one_device_has_the_floor_of_the_other_benchmarks():
    stages = part(MODELS["0.6b"]).decode_step(256, 1024)
    sizes = common.MODELS["qwen3-0.6b"]
    expected = common.compute_decode_floor_s(sizes, common.H200, num_rows=256, context=1024)
    assert floors.compute_floor_s(stages, H200)[0] == pytest.approx(expected, rel=1e-6)


def test_weights_of_two_models():
    dense = floors.Weights.count(QWEN_7B)
    # 28 layers of q, k, v, o (3584 x 3584, twice 3584 x 512, 3584 x 3584) and 3 of 3584 x 18944.
    layer = 2 * 3584 * (3584 + 512) + 3 * 3584 * 18_944
    assert (dense.dense, dense.experts, dense.table) == (28 * layer, 0, 152_064 * 3584)
    assert dense.params == pytest.approx(7.62e9, rel=0.01)
    mixture = floors.Weights.count(MIXTURE)
    # 48 layers of 128 experts, each 3 x 2048 x 768; 8 are chosen.
    assert mixture.experts == 48 * 128 * 3 * 2048 * 768
    assert mixture.active_share == 8 / 128
    # The name says 3.3e9 a token, and 30.5e9 in all; the table of ids is not multiplied with.
    assert mixture.layers + mixture.table == pytest.approx(3.04e9, rel=0.01)
    assert mixture.params == pytest.approx(30.5e9, rel=0.01)


def test_a_hybrid_reads_and_writes_its_states():
    hybrid, dense = MODELS["hybrid-0.8b"], MODELS["0.6b"]
    # 18 delta nets with 16 heads of 128 x 128, and three tokens of 3 x 16 x 128 channels.
    values = 18 * (16 * 128 * 128 + 3 * 3 * 16 * 128)
    assert (part(hybrid).state, part(hybrid, tensor=2).state) == (values, values // 2)
    assert part(dense).state == 0
    # Six layers have attention, with 8 heads of 256.
    assert part(hybrid).attention == 4 * 6 * 8 * 256
    few, more = (part(hybrid).decode_step(rows, 1000) for rows in (10, 11))
    cache = 6 * 2 * 2 * 256 * 1000 * 2
    read = sum(stage.memory for stage in more) - sum(stage.memory for stage in few)
    assert read == pytest.approx(8 * values + cache + 8 * 248_320)
    counted = floors.Weights.count(hybrid)
    # A convolution has no matrix product: 4 x 6144 weights in each delta net.
    mixer = 1024 * (6144 + 2048 + 2 * 16) + 2048 * 1024
    attention = 1024 * (2 * 2048 + 2 * 512) + 2048 * 1024
    mlp = 3 * 1024 * 3584
    assert (counted.dense, counted.experts) == (18 * mixer + 6 * attention + 24 * mlp, 0)


def test_few_rows_read_few_experts():
    single, many = (part(MIXTURE).decode_step(rows, 1) for rows in (1, 1024))
    weights = floors.Weights.count(MIXTURE)
    assert single[0].memory == pytest.approx(2 * (weights.layers + weights.table))
    params = weights.dense + weights.table + weights.experts
    assert many[0].memory == pytest.approx(2 * params)
    # If experts are split, the rows of all devices reach those of each.
    split = part(MIXTURE, expert=8).decode_step(128, 1)
    assert split[0].memory == pytest.approx(2 * (params - weights.experts * 7 / 8))
    # 48 layers of 7 x 128 tokens, 2048 wide: there in two bytes, and back in four.
    assert split[-1].links == 48 * 7 * 128 * 2048 * 6


def test_operations_of_an_update():
    small = part(MODELS["0.6b"])
    weights, T = floors.Weights.count(MODELS["0.6b"]), 2048
    attention = 4 * 28 * 16 * 128 * T / 2
    [stored, _] = small.update(1, T, recomputes_layers=False)
    [recomputed, _] = small.update(1, T, recomputes_layers=True)
    # 4.28e9 are needed. The table's forward pass and the backward pass's scores come on top.
    needed = common.count_train_flops_per_token(common.MODELS["qwen3-0.6b"], T)
    assert needed == pytest.approx(4.28e9, rel=2e-3)
    assert stored.flops == pytest.approx(needed + 2 * weights.table + attention / 2)
    assert recomputed.flops == pytest.approx(stored.flops + 2 * weights.layers + attention)
    [scored, _] = small.scoring(1, T)
    assert scored.flops == pytest.approx(needed / 3)


def test_bytes_between_devices():
    # 7.1e9 weights in bfloat16 over eight devices of one host: 7/8 come from others, by links.
    values = 28 * (2 * 3584 * (3584 + 512) + 3 * 3584 * 18_944) + 2 * 152_064 * 3584
    h100 = floors.DEVICES["h100"]
    one_host = part(QWEN_7B, h100, fsdp=8).gather_weights(2)
    assert one_host.links == pytest.approx(7 / 8 * 2 * values)
    assert one_host.network == 0
    # Over two hosts half comes by the network; each device of a host takes an eighth of it.
    two_hosts = part(QWEN_7B, h100, fsdp=16).gather_weights(2)
    assert two_hosts.network == pytest.approx(values / 8)
    assert two_hosts.links == pytest.approx(15 / 16 * 2 * values - values / 8)
    # With tensor=8 each of eight hosts has a part of every matrix: all comes by the network.
    spread = part(QWEN_7B, h100, fsdp=8, tensor=8).gather_weights(2)
    assert spread.network == pytest.approx(7 / 8 * 2 * values / 8)
    assert spread.links == pytest.approx(0)
    # All chips of a slice are linked.
    chips = part(QWEN_7B, floors.DEVICES["v6e"], fsdp=16).gather_weights(2)
    assert (chips.links, chips.network) == (pytest.approx(15 / 16 * 2 * values), 0)


def test_every_case_has_a_plan_within_its_device():
    for case in published.CASES.values():
        config, model = case.build_model()
        for name in published.memory.PARTS:
            planned = published.memory.planned_bytes(config, model, case.target, name)
            assert 0 < planned <= case.target.limit_bytes, (case.name, name)


def test_a_refusal_of_the_compiler_has_the_size_it_needs():
    refusal = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space "
        "hbm. Used 45.21G of 31.25G hbm. Exceeded hbm capacity"
    )
    assert float(published.MEMORY_PATTERN.search(refusal)[1]) == 45.21


@pytest.mark.slow(
    instead="extras/plan/test_memory.py::TestAgainstTheCompiler::test_two_layers_on_one_device"
)
@pytest.mark.skipif(
    not (importlib.util.find_spec("libtpu") or os.environ.get("LIBTPU_DIR")),
    reason="libtpu is not installed; LIBTPU_DIR may name a folder of `pip install --target`",
)
def test_two_layers_compile_for_a_slice_of_v6e(tmp_path):
    flags = ["--cases=search_r1@v6e", "--parts=decode,score", "--num_layers=2"]
    command = [sys.executable, "-m", "benchmarks.published", f"--out={tmp_path}", *flags]
    subprocess.run(command, cwd=ROOT, check=True, timeout=1200)
    results = json.loads((tmp_path / "results.json").read_text())
    case = published.CASES["search_r1@v6e"]
    config, model = case.build_model(2)
    for result in results.values():
        [program] = result["programs"].values()
        planned = published.memory.planned_bytes(config, model, case.target, result["part"])
        assert program["total"] + program["beside"] == pytest.approx(planned, rel=0.1)

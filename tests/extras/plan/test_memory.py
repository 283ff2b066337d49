"""Memory plans against hand-worked numbers and against the compiler."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from benchmarks.common import make_libtpu_environment
from jaxrl.builders.capacity import GIB
from jaxrl.builders.method import build_policy_architecture
from jaxrl.config import default_config
from jaxrl.extras.plan import memory
from tests import compiled_memory as programs
from tests.extras.plan.cases import (
    AHEAD,
    NODE,
    QWEN_7B,
    QWEN_30B,
    QWEN_32B,
    ROOT,
    large_run,
    train_phase,
)


@pytest.fixture
def copies_bfloat16(monkeypatch):
    """Assume a CPU compiler that multiplies float32 copies, as in JAX 0.10.2."""
    monkeypatch.setattr(memory, "CPU_HAS_BFLOAT16_MATMUL", False)


class TestByHand:
    def test_7b_on_eight_devices(self):
        # 28 layers of 3584 x (3584 + 2*512 + 3584) attention, 3 x 3584 x 18944 MLP, the biases and
        # norms, and two tables of 152064 x 3584.
        layer = 3584 * (2 * 3584 + 2 * 512) + 3 * 3584 * 18944 + 3584 + 2 * 512 + 2 * 3584
        num_params = 28 * layer + 3584 + 2 * 152064 * 3584
        plan = memory.make_plan(large_run(), QWEN_7B, NODE)
        assert plan.num_params == num_params == 7_615_616_512
        persistent = plan.phases[0].persistent
        # Norms and biases are whole on every device: less than a thousandth.
        assert persistent["parameters"] == pytest.approx(4 * num_params / 8, rel=1e-3)
        assert persistent["optimizer state"] == pytest.approx(8 * num_params / 8, rel=1e-3)
        reference = train_phase(large_run(**{"kl.coef": 0.01})).persistent["reference parameters"]
        assert reference == persistent["parameters"]
        rollout = plan.phases[1].persistent
        assert rollout["decode weights"] == 2 * num_params
        # Twice 8 of 64 rows, 28 layers, keys and values of 4 heads of 128, 2048 tokens.
        assert rollout["KV cache"] == 2 * 8 * 28 * 2 * 4 * 128 * 2048 * 2
        assert plan.tokens_per_step == 16 * 8 * 2048

    def test_the_cache_takes_what_is_left(self):
        config = large_run(**{"rollout.max_num_seqs": 4096})
        phase = memory.plan_rollout(config, QWEN_7B, NODE)
        page = 28 * 2 * 4 * 128 * 2 * memory.PAGE_TOKENS["triton"]
        assert NODE.usable_bytes - page < phase.peak_bytes <= NODE.usable_bytes
        # A CPU has room for its rows, 128 of full length, whatever that takes.
        small = replace(NODE, platform="cpu")
        config = large_run(**{"rollout.max_num_seqs": 1024, "model.dtype": "float32"})
        persistent = memory.plan_rollout(config, QWEN_7B, small).persistent
        assert persistent["KV cache"] == 128 * 28 * 2 * 4 * 128 * 2048 * 4

    def test_the_cache_that_is_configured(self):
        run = large_run(**{"rollout.cache_gib": 2.0})
        persistent = memory.plan_rollout(run, QWEN_7B, NODE).persistent
        assert 1.99 * GIB < persistent["KV cache"] <= 2 * GIB
        # One trajectory: 28 x 2 x 4 x 128 x 2048 values of two bytes.
        with pytest.raises(ValueError, match=r"cache_gib=0\.1 cannot hold .* 11\d\.\d\d MiB"):
            memory.plan_rollout(large_run(**{"rollout.cache_gib": 0.1}), QWEN_7B, NODE)

    def test_a_tensor_axis_stays_inside_a_process(self):
        config = large_run(fsdp=4, tensor=4, **{"mesh.data": 4})
        config.optimizer.micro_rows = config.sft.optimizer.micro_rows = 16
        several = replace(NODE, num_devices=64, num_processes=32)
        with pytest.raises(ValueError, match=r"tensor=4 would span .* own 2 devices"):
            memory.make_plan(config, QWEN_32B, several)
        memory.make_plan(config, QWEN_32B, replace(several, num_processes=16))

    def test_a_model_has_so_many_positions(self):
        model = replace(QWEN_7B, max_positions=2047)
        with pytest.raises(ValueError, match=r"max_total_tokens=2048 exceeds the model's 2047"):
            memory.make_plan(large_run(), model, NODE)

    @pytest.mark.parametrize("tied", [False, True])
    def test_its_sampler_s_weights_are_those_that_are_made(self, tied):
        model = replace(programs.MODELS["tiny"], tie_embeddings=tied)
        target = memory.Target(platform="cpu", num_devices=1, memory_bytes=GIB)
        for head in ("", "float32"):
            keys = {"model.dtype": "bfloat16", "model.head_dtype": head}
            config = programs.small_run(1, 1, 1).with_values(keys)
            made = jax.eval_shape(
                partial(
                    build_policy_architecture(config, model).prepare_decoding_weights,
                    dtype=jnp.bfloat16,
                ),
                model.make_abstract_params(),
            )
            held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(made))
            planned = memory.plan_rollout(config, model, target).persistent["decode weights"]
            assert planned == pytest.approx(held, abs=4 * model.width)

    def test_an_evaluation_reads_parameters_from_disk_one_at_a_time(self):
        device = replace(NODE, num_devices=1)
        config = large_run(fsdp=1, stages=("evaluate",))
        plan = memory.make_plan(config, QWEN_7B, device)
        assert [phase.name for phase in plan.phases] == ["rollout", "weights to the sampler"]
        # The three kernels of the MLP are the largest: all are cast while the third is there.
        kernel = 28 * 3584 * 18_944
        assert not plan.phases[1].persistent
        assert plan.phases[1].moments["copying"] == {
            "decode weights so far": 3 * 2 * kernel,
            "one parameter": 4 * kernel,
        }
        # After a warm start all parameters are there.
        config = config.with_values({"stages": ("sft", "evaluate"), "sft.optimizer.micro_rows": 1})
        handing = memory.make_plan(config, QWEN_7B, device).phases[-1]
        assert handing.persistent["parameters"] == 4 * plan.num_params

    @pytest.mark.parametrize(
        ("platform", "devices", "gradients", "tables", "logits"),
        # Units of a table of 152064 x 3584 in float32, and of float32 logits of a chunk.
        [
            ("tpu", 1, 0.5, 0, 1),  # the gradient of a single chunk is added in bfloat16
            ("gpu", 1, 2, 0, 1),
            ("cpu", 1, 2, 1, 1.5),
            ("gpu", 8, 2, 1, 2),  # two chunks; what devices sum is there twice
            ("cpu", 8, 3, 1, 1.5),
        ],
    )
    def test_the_output_layer_by_hand(
        self, platform, devices, gradients, tables, logits, copies_bfloat16
    ):
        target = memory.Target(platform=platform, num_devices=devices, memory_bytes=80 * GIB)
        config = large_run(fsdp=devices, **{"optimizer.micro_rows": devices})
        terms = train_phase(config, target=target).moments["output layer"]
        table, chunk = 4 * 152_064 * 3584, 4 * (2048 // devices) * 152_064
        assert terms["gradients of embedding tables"] == pytest.approx(gradients * table, rel=1e-3)
        assert terms.get("embedding tables", 0) == pytest.approx(tables * table, rel=1e-3)
        blocks = 2 * 2**21 if platform == "cpu" else 0
        assert terms["logits"] == logits * chunk + blocks

    def test_remat_and_sharding_save_what_they_should(self):
        peak = lambda **settings: train_phase(large_run(**settings)).peak_bytes  # noqa: E731
        assert peak() < peak(**{"model.remat": "none"})
        assert peak() < peak(fsdp=4)
        assert peak() < peak(**{"optimizer.micro_rows": 16})
        layers = lambda remat: train_phase(large_run(**{"model.remat": remat})).moments["layers"]  # noqa: E731
        name = "saved activations"
        # Of 28 layers as wide as attention's result, two are on their way.
        assert layers("offload")[name] == pytest.approx(2 * 2 / 28 * layers("full")[name], rel=0.01)

    def test_context_splits_rows_and_weights(self):
        whole = train_phase(large_run(fsdp=8, **{"optimizer.micro_rows": 8}))
        keys = {"mesh.data": 1, "mesh.context": 4, "optimizer.micro_rows": 2}
        split = train_phase(large_run(fsdp=2, **keys))
        assert split.persistent["parameters"] == whole.persistent["parameters"]
        assert split.persistent["optimizer state"] == whole.persistent["optimizer state"]
        of_whole, of_split = whole.moments["layers"], split.moments["layers"]
        for name in ("saved activations", "activations of a layer"):
            assert of_whole[name] == 4 * of_split[name]
        assert of_whole["gathered layers"] == of_split["gathered layers"]
        # One row, 4 heads of 128, in bfloat16: both gathered, one turned, gradients in float32.
        tokens = default_config().rollout.max_total_tokens
        assert of_split["keys and values of complete rows"] == tokens * 4 * 128 * (3 * 2 + 2 * 4)
        assert "keys and values of complete rows" not in of_whole
        assert split.peak_bytes < whole.peak_bytes


FEW_LAYERS = ("--model=0.6b", "--layers=4", "--dtype=bfloat16")
ADAPTER_KEYS = ("model.lora.rank=8", "model.lora.base_dtype=bfloat16")


def test_kernels_that_a_run_refuses_are_refused():
    # A Hopper chip would round numbers of 32 bits, in products with experts as in attention.
    for key, model in (("attention", QWEN_7B), ("experts", QWEN_30B)):
        keys = {f"model.{key}": "mosaic_gpu", "model.dtype": "float32"}
        with pytest.raises(ValueError, match=rf"model\.{key} is 'mosaic_gpu', .*is 'float32'"):
            memory.make_plan(large_run(**keys), model, NODE)
        memory.make_plan(large_run(**keys | {"model.dtype": "bfloat16"}), model, NODE)
    # A model without experts has no such products.
    memory.make_plan(large_run(**keys), QWEN_7B, NODE)


class TestAgainstTheCompiler:
    """Compare with argument, output and temporary bytes of the real programs, compiled from
    shapes."""

    def check(self, results):
        assert results
        for program, (planned, compiled) in results.items():
            assert planned >= compiled, program
            if not program.endswith("score"):  # which needs less than an update
                assert planned <= 1.15 * compiled, program

    @pytest.mark.minutes
    def test_two_layers_on_one_device(self):
        target = replace(NODE, platform="cpu", num_devices=1)
        model = replace(programs.MODELS["tiny"], num_layers=2)
        parts = [part for part in programs.PARTS if part != "score"]
        config = programs.small_run(1, 1, 1)
        self.check(programs.compare(config, model, target, jax.devices()[:1], parts))

    @pytest.mark.slow(
        instead="extras/plan/test_memory.py::TestAgainstTheCompiler::test_two_layers_on_one_device"
    )
    @pytest.mark.parametrize(
        "flags",
        [
            ("--model=tiny", "--mesh=2x2x2"),
            ("--model=tiny,0.5b,0.6b", "--mesh=1x1x1"),
            ("--model=tiny,0.5b,0.6b", "--mesh=1x4x1"),
            # Where most of it is tables, and what a CPU copies to multiply bfloat16 in float32.
            (*FEW_LAYERS, "--mesh=1x4x1,1x1x1"),
            (*FEW_LAYERS, "--mesh=1x4x1,1x1x1", "--parts=update,score", "--keys", *ADAPTER_KEYS),
            (*FEW_LAYERS, "--mesh=2x2x1,1x2x2", "--parts=update,score"),
            (*FEW_LAYERS, "--mesh=1x4x1,1x1x1", "--keys", "model.head_dtype=float32"),
        ],
    )
    def test_large_models(self, flags):
        self.check(self.in_a_process(*flags))

    @pytest.mark.slow(
        instead="extras/plan/test_memory.py::TestByHand::test_the_output_layer_by_hand"
    )
    @pytest.mark.skipif(
        not (importlib.util.find_spec("libtpu") or os.environ.get("LIBTPU_DIR")),
        reason="libtpu is not installed; LIBTPU_DIR may name a folder of `pip install --target`",
    )
    def test_few_layers_on_a_v6e(self):
        settings = ("--topology=v6e:2x2", "--mesh=1x4x1,1x1x1", "--parts=update,score")
        self.check(self.in_a_process(*FEW_LAYERS, *settings, **make_libtpu_environment()))

    def in_a_process(self, *arguments, **variables):
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", **variables}
        command = [sys.executable, "-m", "tests.compiled_memory", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


def test_a_rollout_one_step_ahead_lies_beside_the_update():
    alone = train_phase(large_run(**{"rollout.cache_gib": 4.0}))
    beside = train_phase(large_run(**AHEAD))
    sampler = memory.plan_rollout(large_run(**AHEAD), QWEN_7B, NODE)
    moment = sum(sampler.moments[sampler.peak_moment].values())
    more = sampler.persistent["decode weights"] + sampler.persistent["KV cache"] + moment
    assert beside.peak_bytes == alone.peak_bytes + more
    assert sampler.persistent["KV cache"] > 3 * GIB


def test_devices_that_only_sample_hold_the_sampler_alone():
    keys = {"mesh.data": 1, "mesh.rollout_devices": 2, "optimizer.micro_rows": 6}
    config = large_run(fsdp=6, **AHEAD | keys)
    plan = memory.make_plan(config, QWEN_7B, NODE)
    update, sampler, moved = plan.phases
    assert plan.mesh == {"data": 1, "fsdp": 6, "context": 1, "expert": 1, "tensor": 1}
    assert "KV cache" not in update.persistent
    assert {*sampler.persistent} == {"decode weights", "KV cache"}
    # A copy of all weights lies beside the state while they are handed over.
    weights = {"decode weights": sampler.persistent["decode weights"]}
    assert moved.moments == {"copying": weights}
    assert moved.persistent["optimizer state"] == update.persistent["optimizer state"]


ADAPTED = {"model.lora.rank": 8, "model.lora.targets": ("q", "down"), "kl.coef": 0.01}


class TestAdapters:
    """Rank 8 on q (3584 to 3584) and down (18944 to 3584) in 28 layers, on one device."""

    def plan(self, **keys):
        keys = {**ADAPTED, "optimizer.micro_rows": 1, **keys}
        return memory.make_plan(large_run(fsdp=1, **keys), QWEN_7B, replace(NODE, num_devices=1))

    @pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
    def test_by_hand(self, dtype, size):
        num = 28 * 8 * (2 * 3584 + 18944 + 3584)
        plan = self.plan(**{"model.lora.base_dtype": dtype})
        persistent = plan.phases[0].persistent
        assert plan.num_trained == num
        assert persistent["frozen weights"] == size * plan.num_params
        assert (
            persistent["parameters"]
            == persistent["gradients"]
            == persistent["reference parameters"]
            == 4 * num
        )
        assert persistent["optimizer state"] == 8 * num
        cast = plan.phases[0].moments["layers"]["weights in the compute dtype"]
        assert cast == 2 * num + (2 * plan.num_params if size == 4 else 0)
        rollout = plan.phases[-1].persistent
        assert rollout["decode weights"] == cast  # what is in its dtype is read where it is

    def test_int8_and_merged(self):
        layer = 3584 * (2 * 3584 + 2 * 512) + 3 * 3584 * 18944
        outputs = 2 * 3584 + 2 * 512 + 2 * 18944 + 3584
        int8 = self.plan(**{"model.lora.base_dtype": "int8"})
        others = int8.num_params - 28 * layer
        persistent = int8.phases[0].persistent
        assert persistent["frozen weights"] == 28 * (layer + 4 * outputs) + 2 * others
        merged = self.plan(**{"model.lora.base_dtype": "bfloat16", "model.lora.sampler": "merged"})
        weights = merged.phases[-1].persistent["decode weights"]
        assert weights == 2 * 28 * (3584 * 3584 + 18944 * 3584)

    @pytest.mark.slow(instead="extras/plan/test_memory.py::TestAdapters::test_by_hand")
    @pytest.mark.parametrize("dtype", ["float32", "int8"])
    def test_against_the_compiler(self, dtype):
        lora = {"model.lora.rank": 8, "model.lora.base_dtype": dtype}
        config = programs.small_run(1, 1, 1).with_values(lora)
        target = replace(NODE, platform="cpu", num_devices=1)
        results = programs.compare(config, programs.MODELS["tiny"], target, jax.devices()[:1])
        TestAgainstTheCompiler().check(results)

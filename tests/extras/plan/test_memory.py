"""The plan of memory: against arithmetic by hand, and against the compiler."""

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

from benchmarks.common import libtpu_environment
from jaxrl.builders.capacity import GIB
from jaxrl.builders.method import build_policy_architecture, compute_batch_shape
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
from tests.helpers import TINY_MOE, resolved, settings


@pytest.fixture
def copies_bfloat16(monkeypatch):
    """A CPU's compiler that multiplies float32 copies, as with JAX 0.10.2."""
    monkeypatch.setattr(memory, "CPU_HAS_BFLOAT16_MATMUL", False)


class TestByHand:
    def test_7b_on_eight_devices(self):
        # 28 layers of 3584 x (3584 + 2*512 + 3584) attention, 3 x 3584 x 18944 MLP, the biases and
        # norms, and two tables of 152064 x 3584.
        layer = 3584 * (2 * 3584 + 2 * 512) + 3 * 3584 * 18944 + 3584 + 2 * 512 + 2 * 3584
        num_params = 28 * layer + 3584 + 2 * 152064 * 3584
        made = memory.make_plan(large_run(), QWEN_7B, NODE)
        assert made.num_params == num_params == 7_615_616_512
        kept = made.phases[0].kept
        # Norms and biases are whole on every device: less than a thousandth.
        assert kept["parameters"] == pytest.approx(4 * num_params / 8, rel=1e-3)
        assert kept["optimizer state"] == pytest.approx(8 * num_params / 8, rel=1e-3)
        reference = train_phase(large_run(**{"kl.coef": 0.01})).kept["reference parameters"]
        assert reference == kept["parameters"]
        rollout = made.phases[1].kept
        assert rollout["decode weights"] == 2 * num_params
        # Twice 8 of 64 rows, 28 layers, keys and values of 4 heads of 128, 2048 tokens.
        assert rollout["KV cache"] == 2 * 8 * 28 * 2 * 4 * 128 * 2048 * 2
        assert made.tokens_per_step == 16 * 8 * 2048

    def test_the_cache_takes_what_is_left(self):
        config = large_run(**{"rollout.max_num_seqs": 4096})
        phase = memory.plan_rollout(config, QWEN_7B, NODE)
        page = 28 * 2 * 4 * 128 * 2 * memory.PAGE_TOKENS["triton"]
        assert NODE.usable - page < phase.peak <= NODE.usable
        # A CPU has room for its rows, 128 of full length, whatever that takes.
        small = replace(NODE, platform="cpu")
        config = large_run(**{"rollout.max_num_seqs": 1024, "model.dtype": "float32"})
        kept = memory.plan_rollout(config, QWEN_7B, small).kept
        assert kept["KV cache"] == 128 * 28 * 2 * 4 * 128 * 2048 * 4

    def test_the_cache_that_is_configured(self):
        kept = memory.plan_rollout(large_run(**{"rollout.cache_gib": 2.0}), QWEN_7B, NODE).kept
        assert 1.99 * GIB < kept["KV cache"] <= 2 * GIB
        # One trajectory: 28 x 2 x 4 x 128 x 2048 values of two bytes.
        with pytest.raises(ValueError, match=r"cache_gib=0\.1 does not hold .* 11\d\.\d\d MiB"):
            memory.plan_rollout(large_run(**{"rollout.cache_gib": 0.1}), QWEN_7B, NODE)

    def test_a_cache_that_does_not_fit_is_planned_for_one_trajectory(self):
        tiny = replace(NODE, memory_bytes=GIB)
        made = memory.make_plan(large_run(), QWEN_7B, tiny)
        assert not made.fits
        assert made.phases[1].kept["KV cache"] == 28 * 2 * 4 * 128 * 2048 * 2

    def test_a_tensor_axis_stays_inside_a_process(self):
        config = large_run(fsdp=4, tensor=4, **{"mesh.data": 4})
        config.optimizer.micro_rows = config.sft.optimizer.micro_rows = 16
        several = replace(NODE, num_devices=64, num_processes=32)
        with pytest.raises(ValueError, match=r"tensor=4 would span .* own 2 devices"):
            memory.make_plan(config, QWEN_32B, several)
        memory.make_plan(config, QWEN_32B, replace(several, num_processes=16))

    def test_a_model_has_so_many_positions(self):
        model = replace(QWEN_7B, max_positions=2047)
        with pytest.raises(ValueError, match=r"max_total_tokens=2048 is beyond the model's 2047"):
            memory.make_plan(large_run(), model, NODE)

    def test_only_the_rows_of_stages_that_run_are_checked(self):
        config = large_run(fsdp=64, **{"optimizer.micro_rows": 64, "rollout.max_num_seqs": 64})
        assert config.sft.optimizer.micro_rows == 8
        memory.make_plan(config, QWEN_32B, replace(NODE, num_devices=64))
        config = config.with_values({"stages": ("sft", "train")})
        with pytest.raises(ValueError, match=r"config.sft.optimizer.micro_rows is 8; .* = 64"):
            memory.make_plan(config, QWEN_32B, replace(NODE, num_devices=64))

    def test_rows_are_as_long_as_kernels_that_share_prompts_have_them(self):
        keys = {"optimizer.micro_rows": 16}
        shapes = {
            platform: memory.make_plan(
                large_run(**keys), QWEN_7B, replace(NODE, platform=platform)
            ).shapes["train update"]
            for platform in ("cpu", "gpu", "tpu")
        }
        # Two trajectories for each of the eight devices: one row of both, but for splash attention.
        assert shapes["cpu"].startswith("8 micro-batches of 8 rows x 4096 tokens")
        assert shapes["gpu"].startswith("8 micro-batches of 8 rows x 4096 tokens")
        assert shapes["tpu"].startswith("8 micro-batches of 16 rows x 2048 tokens")

    def test_a_tensor_axis_splits_the_inner_width_and_not_the_other(self):
        # Width 5,120, inner 25,600, 64 heads of 128, 8 of keys; on eight devices 3,200, 8 and 1.
        terms = QWEN_32B.memory_terms(1), QWEN_32B.memory_terms(8)
        attention = 10 * 64 * 128 + 8 * 8 * 128
        assert terms[0].activations == 4 * 25_600 + 4 * 5_120 + attention
        assert terms[1].activations == 2 * 3_200 + 8 * 5_120 + attention / 8

    @pytest.mark.parametrize("platform", ["cpu", "gpu"])
    @pytest.mark.parametrize("tied", [False, True])
    def test_an_output_layer_in_float32_by_hand(self, platform, tied):
        """Two tables of 152064 x 3584; a tied model's sampler has one for its output alone."""
        target, model = replace(NODE, platform=platform), replace(QWEN_7B, tie_embeddings=tied)
        head, table = {"model.head_dtype": "float32"}, 152_064 * 3584
        plain, own = (
            memory.plan_rollout(large_run(**keys), model, target).kept["decode weights"]
            for keys in ({}, head)
        )
        had = platform == "cpu" or not tied  # a table of two bytes a value
        assert own - plain == pytest.approx((4 - 2 * had) * table, rel=1e-3)
        # Where parameters go as weights are made, the table is the largest of two layers' model.
        evaluation = {"stages": ("sft", "evaluate"), **head}
        made = memory.make_plan(large_run(**evaluation), replace(model, num_layers=2), target)
        [moved] = [phase for phase in made.phases if phase.name == memory.WEIGHTS_PHASE]
        assert [*moved.moments["handing over"].values()] == [(6 if tied else 4) * table]

    def test_what_an_update_casts_of_an_output_layer_in_float32(self):
        """One device: the float32 table is a parameter, and nothing is made of it."""
        target, table = replace(NODE, num_devices=1), 152_064 * 3584
        keys = {"model.head_dtype": "float32", "optimizer.micro_rows": 1}
        name, found = "weights in the compute dtype", {}
        for tied in (False, True):
            model = replace(QWEN_7B, tie_embeddings=tied)
            plain, own = (
                train_phase(large_run(fsdp=1, **keys | more), model, target).moments["layers"][name]
                for more in ({"model.head_dtype": ""}, {})
            )
            found[tied] = plain - own
        assert found == {False: 2 * table, True: 0}  # which a tied one needs for its ids
        # Eight devices gather it: two bytes of the ids' table, four of the output's.
        gathered = train_phase(large_run(**keys | {"optimizer.micro_rows": 8})).moments["output"]
        assert gathered["tables"] == pytest.approx((2 + 4) * table, rel=1e-3)

    @pytest.mark.parametrize(
        ("base_dtype", "cast", "made"), [("float32", 0, 0), ("bfloat16", 4, 4), ("int8", 4, 4)]
    )
    def test_an_adapter_s_output_layer_in_float32(self, base_dtype, cast, made):
        """Bytes a value of the frozen table, which the sampler shares where it is float32."""
        target, table = replace(NODE, num_devices=1), 152_064 * 3584
        lora = {"model.lora.rank": 8, "model.lora.base_dtype": base_dtype}
        keys = {**lora, "optimizer.micro_rows": 1}
        plain, own = (
            memory.make_plan(large_run(fsdp=1, **keys, **more), QWEN_7B, target).phases
            for more in ({}, {"model.head_dtype": "float32"})
        )
        shared = 2 * (base_dtype == "float32")  # bytes that the plain one makes of it
        name = "weights in the compute dtype"
        more = own[0].moments["layers"][name] - plain[0].moments["layers"][name]
        assert more == (cast - shared) * table
        more = own[-1].kept["decode weights"] - plain[-1].kept["decode weights"]
        assert more == (made - shared) * table

    @pytest.mark.parametrize("tied", [False, True])
    def test_its_sampler_s_weights_are_those_that_are_made(self, tied):
        model = replace(programs.MODELS["tiny"], tie_embeddings=tied)
        target = memory.Target(platform="cpu", num_devices=1, memory_bytes=GIB)
        for head in ("", "float32"):
            keys = {"model.dtype": "bfloat16", "model.head_dtype": head}
            config = programs.small_run(1, 1, 1).with_values(keys)
            made = jax.eval_shape(
                partial(
                    build_policy_architecture(config, model).weights_for_decoding,
                    dtype=jnp.bfloat16,
                ),
                model.abstract_params(),
            )
            held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(made))
            planned = memory.plan_rollout(config, model, target).kept["decode weights"]
            assert planned == pytest.approx(held, abs=4 * model.width)

    def test_a_cpu_samples_in_bfloat16_from_copies_in_float32(self, copies_bfloat16):
        cpu = replace(NODE, platform="cpu")
        phases = {
            dtype: memory.plan_rollout(large_run(**{"model.dtype": dtype}), QWEN_7B, cpu)
            for dtype in ("float32", "bfloat16")
        }
        found = {
            dtype: [phase.moments[name].get("float32 copies", 0) for name in ("decode", "reading")]
            for dtype, phase in phases.items()
        }
        assert found["float32"] == [0, 0]
        cache = 2 * phases["bfloat16"].kept["KV cache"]
        assert cache == phases["float32"].kept["KV cache"]
        layers = 28 * 233_057_792
        decode, reading = found["bfloat16"]
        assert decode == pytest.approx(4 * (layers + 152_064 * 3584) + cache, rel=1e-6)
        assert reading == 4 * layers // 2 + cache

    @pytest.mark.parametrize("num_rows", [8, 16])
    def test_a_cpu_that_multiplies_bfloat16_copies_for_one_row_alone(self, num_rows, monkeypatch):
        monkeypatch.setattr(memory, "CPU_HAS_BFLOAT16_MATMUL", True)
        config = large_run(**{"rollout.max_num_seqs": num_rows})  # on eight devices
        phase = memory.plan_rollout(config, QWEN_7B, replace(NODE, platform="cpu"))
        copies = 4 * (28 * 233_057_792 + 152_064 * 3584) + 2 * phase.kept["KV cache"]
        wanted = pytest.approx(copies, rel=1e-6) if num_rows == 8 else 0
        assert phase.moments["decode"].get("float32 copies", 0) == wanted
        assert "float32 copies" not in phase.moments["reading"]
        # A value that is multiplied is as large as it is kept.
        reading, layer = phase.moments["reading"], QWEN_7B.memory_terms(1).prefill_activations
        assert reading["activations"] == 256 * 2 * layer

    def test_a_cpu_that_multiplies_bfloat16_trains_like_an_accelerator(self, monkeypatch):
        monkeypatch.setattr(memory, "CPU_HAS_BFLOAT16_MATMUL", True)
        one = memory.Target(platform="cpu", num_devices=1, memory_bytes=80 * GIB)
        layers = train_phase(large_run(fsdp=1, **{"optimizer.micro_rows": 2}), target=one)
        weights = layers.moments["layers"]["weights in the compute dtype"]
        assert weights == 2 * 7_615_616_512

    def test_an_evaluation_reads_parameters_from_disk_one_at_a_time(self):
        one = replace(NODE, num_devices=1)
        config = large_run(fsdp=1, stages=("evaluate",))
        made = memory.make_plan(config, QWEN_7B, one)
        assert [phase.name for phase in made.phases] == ["rollout", "weights to the sampler"]
        # The three kernels of the MLP are the largest: all are cast while the third is there.
        kernel = 28 * 3584 * 18_944
        assert not made.phases[1].kept
        assert made.phases[1].moments["handing over"] == {
            "decode weights so far": 3 * 2 * kernel,
            "one parameter": 4 * kernel,
        }
        # After a warm start all parameters are there.
        config = config.with_values({"stages": ("sft", "evaluate"), "sft.optimizer.micro_rows": 1})
        handing = memory.make_plan(config, QWEN_7B, one).phases[-1]
        assert handing.kept["parameters"] == 4 * made.num_params

    def test_few_questions_are_asked_in_few_rows(self):
        one = memory.Target(platform="cpu", num_devices=1, memory_bytes=80 * GIB)
        keys = {"model.dtype": "float32", "rollout.max_num_seqs": 64, "eval.max_tasks": 3}
        config = large_run(fsdp=1, **keys, **{"eval.samples": 2})
        kept = memory.plan_rollout(config, QWEN_7B, one).kept
        past = {}
        for stages, suites in (
            (("train",), ("greedy",)),
            (("evaluate",), ("sampled", "greedy")),
            (("evaluate",), ("greedy",)),
        ):
            config = config.with_values({"stages": stages, "eval.final_suites": suites})
            phase = memory.make_plan(config, QWEN_7B, one).phases[-2 if "train" in stages else 0]
            decode = phase.moments["decode"]
            past[stages, suites] = decode["rows' past"], decode["logits"], phase.kept
        # 64, then 6 and 3 questions, in programs of 64, 32, 16 or 4 rows of 2048 tokens.
        row = 28 * 2 * 4 * 128 * 2048 * 4
        assert [found[:2] for found in past.values()] == [
            (rows * row, 3 * rows * 152_064 * 4) for rows in (64, 16, 4)
        ]
        for *_, others in past.values():  # the cache is made for all rows
            assert others["KV cache"] == kept["KV cache"] == 64 * row

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
        terms = train_phase(config, target=target).moments["output"]
        table, chunk = 4 * 152_064 * 3584, 4 * (2048 // devices) * 152_064
        assert terms["gradients of tables"] == pytest.approx(gradients * table, rel=1e-3)
        assert terms.get("tables", 0) == pytest.approx(tables * table, rel=1e-3)
        blocks = 2 * 2**21 if platform == "cpu" else 0
        assert terms["logits"] == logits * chunk + blocks

    def test_a_tenth_is_added_to_temporary_arrays(self):
        phase = train_phase(large_run())
        for terms in phase.moments.values():
            margin = terms.pop("margin")
            held = ("weights in the compute dtype", "activations kept for the backward pass")
            temporary = sum(terms.values()) - sum(terms[name] for name in held)
            assert margin == pytest.approx(0.1 * temporary)
        assert "margin" not in phase.kept

    def test_what_a_device_has_of_its_own_is_not_gathered(self):
        keys = {"mesh.data": 1, "mesh.expert": 8, "optimizer.micro_rows": 8}
        config = large_run(fsdp=1, **keys)
        model = programs.MODELS["30b-a3b"]
        gathered = memory.plan_update(config, model, NODE, "train").moments["layers"]
        # Attention alone: 32 heads of queries, 4 of keys and values, and the router.
        values = 2048 * 128 * (2 * 32 + 2 * 4) + 2048 * 128
        assert gathered["layers gathered"] == pytest.approx(2 * 2 * values, rel=1e-3)

    def test_remat_and_sharding_save_what_they_should(self):
        peak = lambda **settings: train_phase(large_run(**settings)).peak  # noqa: E731
        assert peak() < peak(**{"model.remat": "none"})
        assert peak() < peak(fsdp=4)
        assert peak() < peak(**{"optimizer.micro_rows": 16})
        layers = lambda remat: train_phase(large_run(**{"model.remat": remat})).moments["layers"]  # noqa: E731
        kept = "activations kept for the backward pass"
        # Of 28 layers as wide as attention's result, two are on their way.
        assert layers("offload")[kept] == pytest.approx(2 * 2 / 28 * layers("full")[kept], rel=0.01)

    def test_context_splits_rows_and_weights(self):
        whole = train_phase(large_run(fsdp=8, **{"optimizer.micro_rows": 8}))
        cut = {"mesh.data": 1, "mesh.context": 4, "optimizer.micro_rows": 2}
        pieces = train_phase(large_run(fsdp=2, **cut))
        assert pieces.kept["parameters"] == whole.kept["parameters"]
        assert pieces.kept["optimizer state"] == whole.kept["optimizer state"]
        one, other = (phase.moments["layers"] for phase in (whole, pieces))
        for name in ("activations kept for the backward pass", "activations of a layer"):
            assert one[name] == 4 * other[name]
        assert one["layers gathered"] == other["layers gathered"]
        # One row, 4 heads of 128, in bfloat16: both gathered, one turned, gradients in float32.
        tokens = default_config().rollout.max_total_tokens
        assert other["keys and values of whole rows"] == tokens * 4 * 128 * (3 * 2 + 2 * 4)
        assert "keys and values of whole rows" not in whole.moments["layers"]
        assert pieces.peak < whole.peak


FEW_LAYERS = ("--model=0.6b", "--layers=4", "--dtype=bfloat16")
BFLOAT16_ADAPTER = ("model.lora.rank=8", "model.lora.base_dtype=bfloat16")


def test_kernels_that_a_run_refuses_are_refused():
    # A Hopper chip would round numbers of 32 bits, in products with experts as in attention.
    narrow, wide = ({"model.dtype": name} for name in ("bfloat16", "float32"))
    for key, model in (("attention", QWEN_7B), ("experts", QWEN_30B)):
        named = {f"model.{key}": "mosaic_gpu"}
        memory.make_plan(large_run(**named, **narrow), model, NODE)
        with pytest.raises(ValueError, match=rf"model\.{key} is 'mosaic_gpu', .*is 'float32'"):
            memory.make_plan(large_run(**named, **wide), model, NODE)
        tpus = replace(NODE, platform="tpu")
        with pytest.raises(ValueError, match=rf"model\.{key} is 'mosaic_gpu', .*devices are tpus"):
            memory.make_plan(large_run(**named, **narrow), model, tpus)
    # A model without experts has no such products.
    memory.make_plan(large_run(**{"model.experts": "mosaic_gpu"}, **wide), QWEN_7B, NODE)


class TestAgainstTheCompiler:
    """Argument, output and temporary bytes of the real programs, compiled for shapes alone."""

    def check(self, results):
        assert results
        for program, (planned, compiled) in results.items():
            assert planned >= compiled, program
            if not program.endswith("score"):  # which needs less than an update
                assert planned <= 1.15 * compiled, program

    @pytest.mark.slow(
        instead="extras/plan/test_memory.py::TestAgainstTheCompiler::test_two_layers_on_one_device"
    )
    def test_one_device(self):
        self.check(self.on_one_device(programs.MODELS["tiny"]))

    @pytest.mark.minutes
    def test_two_layers_on_one_device(self):
        self.check(self.on_one_device(replace(programs.MODELS["tiny"], num_layers=2)))

    def on_one_device(self, model):
        target = replace(NODE, platform="cpu", num_devices=1)
        return programs.compare(programs.small_run(1, 1, 1), model, target, jax.devices()[:1])

    @pytest.mark.slow(
        instead="extras/plan/test_memory.py::TestAgainstTheCompiler::test_two_layers_on_one_device"
    )
    def test_eight_devices(self):
        self.check(self.in_a_process("--model=tiny", "--mesh=2x2x2"))

    @pytest.mark.slow(
        instead="extras/plan/test_memory.py::TestAgainstTheCompiler::test_two_layers_on_one_device"
    )
    @pytest.mark.parametrize("mesh", ["1x1x1", "1x4x1"])
    def test_large_models(self, mesh):
        self.check(self.in_a_process("--model=tiny,0.5b,0.6b", f"--mesh={mesh}"))

    @pytest.mark.slow(
        instead="extras/plan/test_memory.py::TestAgainstTheCompiler::test_two_layers_on_one_device"
    )
    @pytest.mark.parametrize(
        "settings",
        [
            ("--mesh=1x4x1,1x1x1",),
            ("--mesh=1x4x1,1x1x1", "--parts=update,score", "--keys", *BFLOAT16_ADAPTER),
            ("--mesh=2x2x1,1x2x2", "--parts=update,score"),
            ("--mesh=1x4x1,1x1x1", "--keys", "model.head_dtype=float32"),
        ],
    )
    def test_few_layers_in_bfloat16(self, settings):
        """Where most of it is tables, and what a CPU copies to multiply bfloat16 in float32."""
        self.check(self.in_a_process(*FEW_LAYERS, *settings))

    @pytest.mark.slow(
        instead="extras/plan/test_memory.py::TestByHand::test_the_output_layer_by_hand"
    )
    @pytest.mark.skipif(
        not (importlib.util.find_spec("libtpu") or os.environ.get("LIBTPU_DIR")),
        reason="libtpu is not installed; LIBTPU_DIR may name a folder of `pip install --target`",
    )
    def test_few_layers_on_a_v6e(self):
        settings = ("--topology=v6e:2x2", "--mesh=1x4x1,1x1x1", "--parts=update,score")
        self.check(self.in_a_process(*FEW_LAYERS, *settings, **libtpu_environment()))

    def in_a_process(self, *arguments, **variables):
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", **variables}
        command = [sys.executable, "-m", "tests.compiled_memory", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


def test_a_rollout_one_step_ahead_lies_beside_the_update():
    alone, beside = (
        train_phase(large_run(**{"rollout.cache_gib": 4.0})),
        train_phase(large_run(**AHEAD)),
    )
    sampler = memory.plan_rollout(large_run(**AHEAD), QWEN_7B, NODE)
    moment = sum(sampler.moments[sampler.moment].values())
    more = sampler.kept["decode weights"] + sampler.kept["KV cache"] + moment
    assert beside.peak == alone.peak + more
    assert sampler.kept["KV cache"] > 3 * GIB


def test_devices_that_only_sample_hold_the_sampler_alone():
    own = {"mesh.data": 1, "mesh.rollout_devices": 2, "optimizer.micro_rows": 6}
    config = large_run(fsdp=6, **AHEAD | own)
    plan = memory.make_plan(config, QWEN_7B, NODE)
    update, sampler, moved = plan.phases
    assert plan.mesh == {"data": 1, "fsdp": 6, "context": 1, "expert": 1, "tensor": 1}
    assert "KV cache" not in update.kept
    assert {*sampler.kept} == {"decode weights", "KV cache"}
    # A copy of all weights lies beside the state while they are handed over.
    assert moved.moments == {"handing over": {"decode weights": sampler.kept["decode weights"]}}
    assert moved.kept["optimizer state"] == update.kept["optimizer state"]
    with pytest.raises(
        ValueError, match=r"max_num_seqs is 63; .* rollout_devices / tensor, of all pr"
    ):
        memory.make_plan(
            large_run(fsdp=6, **AHEAD | own | {"rollout.max_num_seqs": 63}), QWEN_7B, NODE
        )


ADAPTED = {"model.lora.rank": 8, "model.lora.targets": ("q", "down"), "kl.coef": 0.01}


class TestAdapters:
    def test_by_hand(self):
        """Rank 8 on q, 3584 to 3584, and down, 18944 to 3584, in 28 layers; on one device."""
        one = replace(NODE, num_devices=1)
        num = 28 * 8 * (2 * 3584 + 18944 + 3584)
        for dtype, size in (("float32", 4), ("bfloat16", 2)):
            keys = {**ADAPTED, "model.lora.base_dtype": dtype, "optimizer.micro_rows": 1}
            made = memory.make_plan(large_run(fsdp=1, **keys), QWEN_7B, one)
            kept = made.phases[0].kept
            assert made.num_trained == num
            assert kept["frozen weights"] == size * made.num_params
            assert (
                kept["parameters"] == kept["gradients"] == kept["reference parameters"] == 4 * num
            )
            assert kept["optimizer state"] == 8 * num
            cast = made.phases[0].moments["layers"]["weights in the compute dtype"]
            assert cast == 2 * num + (2 * made.num_params if size == 4 else 0)
            rollout = made.phases[-1].kept
            assert rollout["decode weights"] == cast  # what is in its dtype is read where it is

    def test_int8_and_merged(self):
        one = replace(NODE, num_devices=1)
        plan = lambda **keys: memory.make_plan(  # noqa: E731
            large_run(fsdp=1, **{**ADAPTED, "optimizer.micro_rows": 1, **keys}), QWEN_7B, one
        )
        layer = 3584 * (2 * 3584 + 2 * 512) + 3 * 3584 * 18944
        outputs = 2 * 3584 + 2 * 512 + 2 * 18944 + 3584
        int8 = plan(**{"model.lora.base_dtype": "int8"})
        others = int8.num_params - 28 * layer
        kept = int8.phases[0].kept
        assert kept["frozen weights"] == 28 * (layer + 4 * outputs) + 2 * others
        merged = plan(**{"model.lora.base_dtype": "bfloat16", "model.lora.sampler": "merged"})
        weights = merged.phases[-1].kept["decode weights"]
        assert weights == 2 * 28 * (3584 * 3584 + 18944 * 3584)

    def test_several_devices_gather_the_base_for_the_sampler(self):
        keys = {**ADAPTED, "model.lora.base_dtype": "bfloat16"}
        made = memory.make_plan(large_run(**keys), QWEN_7B, NODE)
        assert made.phases[0].kept["frozen weights"] == pytest.approx(
            2 * made.num_params / 8, rel=1e-3
        )
        assert made.phases[-1].kept["decode weights"] > 1.9 * made.num_params

    @pytest.mark.slow(instead="extras/plan/test_memory.py::TestAdapters::test_by_hand")
    @pytest.mark.parametrize("dtype", ["float32", "int8"])
    def test_against_the_compiler(self, dtype):
        lora = {"model.lora.rank": 8, "model.lora.base_dtype": dtype}
        config = programs.small_run(1, 1, 1).with_values(lora)
        target = replace(NODE, platform="cpu", num_devices=1)
        found = programs.compare(config, programs.MODELS["tiny"], target, jax.devices()[:1])
        TestAgainstTheCompiler().check(found)


@pytest.mark.parametrize(
    ("platform", "dtype", "dense_bytes", "expert_bytes"),
    [("cpu", "float32", 4, 4), ("cpu", "bfloat16", 4, 3), ("gpu", "bfloat16", 2, 2)],
)
def test_what_experts_compute_is_copied_in_part_on_a_cpu(
    platform, dtype, dense_bytes, expert_bytes, copies_bfloat16
):
    config = resolved(
        settings(
            **{"model.dtype": dtype, "optimizer.micro_rows": 1},
            **{"rollout.max_total_tokens": 100, "rollout.max_prompt_tokens": 50},
        )
    )
    target = memory.Target(platform=platform, num_devices=1, memory_bytes=GIB)
    dense, experts = TINY_MOE.memory_terms(1), TINY_MOE.expert_terms(1, 1)
    phase = memory.plan_update(config, TINY_MOE, target, "train")
    tokens = compute_batch_shape(config, "train", 1).row_tokens
    held = experts.activations - (0 if platform == "cpu" else experts.reused_activations)
    assert phase.moments["layers"]["activations of a layer"] == tokens * (
        dense_bytes * dense.activations + expert_bytes * held
    )

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
import numpy as np
import pytest

from benchmarks.common import libtpu_environment
from jaxrl.builders.capacity import GIB
from jaxrl.builders.method import batch_shape, policy_architecture
from jaxrl.config import default_config
from jaxrl.extras.plan import memory
from jaxrl.models.attention.reference import XLA
from jaxrl.models.decoder import init_params
from jaxrl.models.policy import Model
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
from tests.helpers import NUM_TOKENS, TINY_MOE, resolved, settings
from tests.toys import one_device_mesh
from tests.vision import golden


@pytest.fixture
def copies_bfloat16(monkeypatch):
    """A CPU's compiler that multiplies float32 copies, as with JAX 0.10.2."""
    monkeypatch.setattr(memory, "MULTIPLIES_BFLOAT16", False)


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
        rollout = made.phases[1].kept
        assert rollout["decode weights"] == 2 * num_params
        # Twice 8 of 64 rows, 28 layers, keys and values of 4 heads of 128, 2048 tokens.
        assert rollout["KV cache"] == 2 * 8 * 28 * 2 * 4 * 128 * 2048 * 2
        state = {name: kept[name] for name in ("parameters", "optimizer state")}
        assert made.between == {**state, "decode weights": 2 * num_params}
        assert made.tokens_per_step == 16 * 8 * 2048

    def test_between_phases_the_fullest_stage_counts(self):
        keys = {"kl.coef": 0.01, "sft.optimizer.micro_rows": 8}
        between = lambda **more: memory.make_plan(large_run(**keys, **more), QWEN_7B, NODE).between  # noqa: E731
        wanted = between()
        names = ["parameters", "optimizer state", "reference parameters", "decode weights"]
        assert list(wanted) == names
        for stages in (default_config().stages, ("sft", "train", "evaluate"), ("sft", "train")):
            assert between(stages=stages) == wanted
        # Decode weights take the place of the parameters.
        assert list(between(stages=("evaluate",))) == ["decode weights"]
        # Nothing is sampled.
        assert list(between(stages=("sft",))) == ["parameters", "optimizer state"]

    def test_the_cache_takes_what_is_left(self):
        config = large_run(**{"rollout.num_rows": 4096})
        phase = memory.rollout_phase(config, QWEN_7B, NODE)
        page = 28 * 2 * 4 * 128 * 2 * memory.PAGE_TOKENS["triton"]
        assert NODE.usable - page < phase.peak <= NODE.usable
        # A CPU has room for its rows, 128 of full length, whatever that takes.
        small = replace(NODE, platform="cpu")
        config = large_run(**{"rollout.num_rows": 1024, "model.dtype": "float32"})
        kept = memory.rollout_phase(config, QWEN_7B, small).kept
        assert kept["KV cache"] == 128 * 28 * 2 * 4 * 128 * 2048 * 4

    def test_the_cache_that_is_configured(self):
        kept = memory.rollout_phase(large_run(**{"rollout.cache_gib": 2.0}), QWEN_7B, NODE).kept
        assert 1.99 * GIB < kept["KV cache"] <= 2 * GIB
        # One trajectory: 28 x 2 x 4 x 128 x 2048 values of two bytes.
        with pytest.raises(ValueError, match=r"cache_gib=0\.1 does not hold .* 11\d\.\d\d MiB"):
            memory.rollout_phase(large_run(**{"rollout.cache_gib": 0.1}), QWEN_7B, NODE)

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
        config = large_run(fsdp=64, **{"optimizer.micro_rows": 64, "rollout.num_rows": 64})
        assert config.sft.optimizer.micro_rows == 8
        memory.make_plan(config, QWEN_32B, replace(NODE, num_devices=64))
        config = config.with_values({"stages": ("sft", "train")})
        with pytest.raises(ValueError, match=r"config.sft.optimizer.micro_rows is 8; .* = 64"):
            memory.make_plan(config, QWEN_32B, replace(NODE, num_devices=64))

    def test_parameters_are_what_the_model_makes(self):
        model = programs.MODELS["tiny"]
        params = init_params(model, 0)
        target = memory.Target(platform="cpu", num_devices=1, memory_bytes=GIB)
        kept = train_phase(programs.small_run(1, 1, 1), model, target).kept
        assert kept["parameters"] == sum(leaf.nbytes for leaf in jax.tree.leaves(params))

    def test_a_reference_costs_a_copy_of_the_parameters(self):
        kept = train_phase(large_run(**{"kl.coef": 0.01})).kept
        assert kept["reference parameters"] == kept["parameters"]
        assert (
            "reference parameters"
            not in train_phase(large_run(**{"kl.coef": 0.01, "kl.anchor": "old"})).kept
        )

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

    def test_scoring_is_a_phase_where_a_run_scores(self):
        names = lambda **keys: [  # noqa: E731
            phase.name for phase in memory.make_plan(large_run(**keys), QWEN_7B, NODE).phases
        ]
        assert names() == ["train update", "rollout"]  # the update's own log-probabilities
        scored = ["train update", "scoring", "rollout"]
        assert names(**{"optimizer.num_minibatches": 2}) == scored
        assert names(**{"kl.coef": 0.01}) == scored
        phase = memory.score_phase(large_run(**{"kl.coef": 0.01}), QWEN_7B, NODE)
        assert "reference parameters" in phase.kept
        assert "gradients" not in phase.kept
        # Both tables whole, and the float32 logits of a device's eighth of 2048 tokens.
        output = phase.moments["output"]
        assert output["embedding and output gathered"] == pytest.approx(
            2 * 2 * 152_064 * 3584, rel=1e-3
        )
        assert output["logits chunk"] == 256 * 152_064 * 4

    def test_a_tensor_axis_splits_the_inner_width_and_not_the_other(self):
        # Width 5,120, inner 25,600, 64 heads of 128, 8 of keys; on eight devices 3,200, 8 and 1.
        terms = QWEN_32B.memory_terms(1), QWEN_32B.memory_terms(8)
        attention = 10 * 64 * 128 + 8 * 8 * 128
        assert terms[0].activations == 4 * 25_600 + 4 * 5_120 + attention
        assert terms[1].activations == 2 * 3_200 + 8 * 5_120 + attention / 8

    @pytest.mark.parametrize(
        ("platform", "tensor", "values"),
        [
            ("gpu", 1, 18_944 + 2 * 3_584 + 3 * 3_584),  # inner, heads, widths
            ("tpu", 1, 3 * 18_944 + 2 * 3_584),  # 130 MiB a kernel, which arrive in parts
            ("tpu", 2, 9_472 + 3_584 + 3 * 3_584),
            ("cpu", 1, 2 * (2 * 18_944 + 2 * 3_584)),  # twice the bytes
        ],
    )
    def test_what_a_layer_has_while_it_scores(self, platform, tensor, values, copies_bfloat16):
        config = large_run(8 // tensor, tensor, **{"kl.coef": 0.01, "optimizer.micro_rows": 8})
        target = replace(NODE, platform=platform)
        layers = memory.score_phase(config, QWEN_7B, target).moments["layers"]
        assert layers["activations of a layer"] == tensor * 2048 * 2 * values

    def test_tables_are_gathered_once_and_the_output_layer_s_gradient_is_there_twice(self):
        tied = replace(QWEN_7B, tie_embeddings=True)
        moment = train_phase(large_run(), tied).moments["output"]
        assert moment["a micro-batch's gradients"] == pytest.approx(
            2 * 4 * 152_064 * 3584, rel=1e-3
        )
        assert moment["embedding and output gathered"] == pytest.approx(
            2 * 152_064 * 3584, rel=1e-3
        )
        alone = train_phase(large_run(fsdp=1), tied, replace(NODE, num_devices=1))
        assert alone.moments["output"]["a micro-batch's gradients"] < 1.001 * 4 * 152_064 * 3584

    def test_a_tpu_makes_the_gradient_of_logits_as_it_multiplies(self):
        table, tpu = 152_064 * 3584, replace(NODE, platform="tpu")
        names = ("a micro-batch's gradients", "logits chunk, gradients of all")
        output = lambda **keys: train_phase(large_run(**keys), target=tpu).moments["output"]  # noqa: E731
        # What each device sums of the output layer, and the sum of all when no logits are left.
        for chunk in (2048, 8 * 2048):  # an eighth of it on each
            found = output(**{"model.logits_chunk_tokens": chunk})
            assert [found[name] for name in names] == pytest.approx([4 * table] * 2, rel=1e-3)
        # The logits of 8192 tokens, all that a device has, stay in float32.
        keys = {"model.logits_chunk_tokens": 8 * 8192, "optimizer.micro_rows": 32}
        assert output(**keys)[names[1]] == 4 * 8192 * 152_064
        # Of two such chunks they are gone when sums begin, of which they are larger.
        found = output(**{**keys, "optimizer.micro_rows": 64})
        assert sum(found[name] for name in names) == 4 * 8192 * 152_064
        # Both tables are gathered for all micro-batches; their gradients are with those so far.
        layers = train_phase(large_run(), target=tpu).moments["layers"]
        assert layers["embedding and output gathered"] == pytest.approx(4 * table, rel=1e-3)
        gradients = 2 * 28 * 233_000_000 / 8  # of the layers, in bfloat16
        assert layers["a micro-batch's gradients"] == pytest.approx(gradients, rel=1e-2)

    def test_one_tpu_adds_to_the_gradients_at_once(self):
        one = memory.Target(platform="tpu", num_devices=1, memory_bytes=80 * GIB)
        output = lambda chunk: train_phase(  # noqa: E731
            large_run(fsdp=1, **{"optimizer.micro_rows": 1, "model.logits_chunk_tokens": chunk}),
            QWEN_7B,
            one,
        ).moments["output"]
        names = ("a micro-batch's gradients", "logits chunk, gradients of all")
        whole = output(2048)
        assert names[0] not in whole
        assert whole[names[1]] == 4 * 2048 * 152_064  # one chunk: logits as they were
        assert "embedding and output gathered" not in whole
        parts = output(512)
        assert parts[names[0]] == pytest.approx(4 * 152_064 * 3584, rel=1e-3)
        assert parts[names[1]] == 2 * 512 * 152_064

    def test_a_cpu_turns_a_tied_table_over_in_bfloat16(self, copies_bfloat16):
        cpu = memory.Target(platform="cpu", num_devices=8, memory_bytes=80 * GIB)
        tied, table = replace(QWEN_7B, tie_embeddings=True), 152_064 * 3584
        found = {
            dtype: train_phase(large_run(**{"model.dtype": dtype}), tied, cpu).moments["output"]
            for dtype in ("float32", "bfloat16")
        }
        name = "embedding and output gathered"
        assert found["float32"][name] == pytest.approx(4 * table, rel=1e-3)
        assert found["bfloat16"][name] == pytest.approx((2 + 2) * table, rel=1e-3)
        # The gradient of 256 tokens' logits, once more than in float32.
        name = "logits chunk, gradients of all"
        assert found["bfloat16"][name] - found["float32"][name] == 2 * 256 * 152_064

    @pytest.mark.parametrize("platform", ["cpu", "gpu"])
    @pytest.mark.parametrize("tied", [False, True])
    def test_an_output_layer_in_float32_by_hand(self, platform, tied):
        """Two tables of 152064 x 3584; a tied model's sampler has one for its output alone."""
        target, model = replace(NODE, platform=platform), replace(QWEN_7B, tie_embeddings=tied)
        head, table = {"model.head_dtype": "float32"}, 152_064 * 3584
        plain, own = (
            memory.rollout_phase(large_run(**keys), model, target).kept["decode weights"]
            for keys in ({}, head)
        )
        had = platform == "cpu" or not tied  # a table of two bytes a value
        assert own - plain == pytest.approx((4 - 2 * had) * table, rel=1e-3)
        # Where parameters go as weights are made, the table is the largest of two layers' model.
        evaluation = {"stages": ("sft", "evaluate"), **head}
        made = memory.make_plan(large_run(**evaluation), replace(model, num_layers=2), target)
        [moved] = [phase for phase in made.phases if phase.name == memory.HANDING_OVER]
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
        name = "embedding and output gathered"
        gathered = train_phase(large_run(**keys | {"optimizer.micro_rows": 8})).moments["output"]
        assert gathered[name] == pytest.approx((2 + 4) * table, rel=1e-3)

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
                partial(policy_architecture(config, model).decode_weights, dtype=jnp.bfloat16),
                model.abstract_params(),
            )
            held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(made))
            planned = memory.rollout_phase(config, model, target).kept["decode weights"]
            assert planned == pytest.approx(held, abs=4 * model.width)

    def test_a_cpu_samples_in_bfloat16_from_copies_in_float32(self, copies_bfloat16):
        cpu = replace(NODE, platform="cpu")
        phases = {
            dtype: memory.rollout_phase(large_run(**{"model.dtype": dtype}), QWEN_7B, cpu)
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
        monkeypatch.setattr(memory, "MULTIPLIES_BFLOAT16", True)
        config = large_run(**{"rollout.num_rows": num_rows})  # on eight devices
        phase = memory.rollout_phase(config, QWEN_7B, replace(NODE, platform="cpu"))
        copies = 4 * (28 * 233_057_792 + 152_064 * 3584) + 2 * phase.kept["KV cache"]
        wanted = pytest.approx(copies, rel=1e-6) if num_rows == 8 else 0
        assert phase.moments["decode"].get("float32 copies", 0) == wanted
        assert "float32 copies" not in phase.moments["reading"]
        # A value that is multiplied is as large as it is kept.
        reading, layer = phase.moments["reading"], QWEN_7B.memory_terms(1).read_activations
        assert reading["activations"] == 256 * 2 * layer

    def test_a_cpu_that_multiplies_bfloat16_trains_like_an_accelerator(self, monkeypatch):
        monkeypatch.setattr(memory, "MULTIPLIES_BFLOAT16", True)
        one = memory.Target(platform="cpu", num_devices=1, memory_bytes=80 * GIB)
        config = large_run(fsdp=1, **{"kl.coef": 0.01, "optimizer.micro_rows": 2})
        for phase in (train_phase(config, target=one), memory.score_phase(config, QWEN_7B, one)):
            layers = phase.moments["layers"]
            assert "float32 copies of these" not in layers
            assert layers["weights in the compute dtype"] == 2 * 7_615_616_512

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

    def test_a_cpu_makes_an_output_layer_of_a_tied_table_too(self):
        one = memory.Target(platform="cpu", num_devices=1, memory_bytes=80 * GIB)
        tied = replace(QWEN_7B, num_layers=1, tie_embeddings=True)
        config = large_run(fsdp=1, stages=("evaluate",))
        made = memory.make_plan(config, tied, one).phases[-1].moments["handing over"]
        table = 152_064 * 3584
        # The table is the largest: in its file, as it is read and as an array.
        assert made == {"decode weights so far": 0, "one parameter": 3 * 4 * table}
        # Of 28 layers the third kernel of the MLP is read when two are cast.
        tied, kernel = replace(tied, num_layers=28), 28 * 3584 * 18_944
        made = memory.make_plan(config, tied, one).phases[-1]
        assert "compiled programs" not in made.kept
        assert made.moments["handing over"] == {
            "decode weights so far": 2 * 2 * kernel,
            "one parameter": 3 * 4 * kernel,
        }

    def test_few_questions_are_asked_in_few_rows(self):
        one = memory.Target(platform="cpu", num_devices=1, memory_bytes=80 * GIB)
        keys = {"model.dtype": "float32", "rollout.num_rows": 64, "eval.max_tasks": 3}
        config = large_run(fsdp=1, **keys, **{"eval.samples": 2})
        kept = memory.rollout_phase(config, QWEN_7B, one).kept
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
        # Two programs read, of 64 and 256 tokens; 4, 2 or 1 decode, of which three count at most.
        programs = [found[2]["compiled programs"] for found in past.values()]
        assert programs == [number * 28 * 9 * 2**18 for number in (5, 4, 3)]

    def test_what_is_left_of_a_program_is_counted_once(self):
        one = memory.Target(platform="cpu", num_devices=1, memory_bytes=80 * GIB)
        config = large_run(fsdp=1, stages=("evaluate",))
        rollout = memory.make_plan(config, QWEN_7B, one).phases[0]
        assert rollout.moments["compiling"]["compiler"] == (100 + 28 * 4) * 2**20 - 28 * 9 * 2**18

    def test_a_cpu_finds_tokens_of_bfloat16_in_a_float32_table(self, copies_bfloat16):
        one = memory.Target(platform="cpu", num_devices=1, memory_bytes=80 * GIB)
        table = 4 * 152_064 * 3584
        for keys in ({}, {**ADAPTED, "model.lora.base_dtype": "bfloat16"}):
            config = large_run(fsdp=1, **{"kl.coef": 0.01, "optimizer.micro_rows": 2, **keys})
            name = "embedding and output gathered"
            tables = memory.score_phase(config, QWEN_7B, one).moments["output"][name]
            assert tables == pytest.approx(table * (1 if keys else 1.5), rel=1e-3)
        # Split over devices, these exchange it in float32 first.
        keys = {"kl.coef": 0.01, "optimizer.micro_rows": 8}
        several = replace(one, num_devices=8)
        moments = memory.score_phase(large_run(**keys), QWEN_7B, several).moments
        assert moments["gathering"][name] == pytest.approx(table * 2.5, rel=1e-3)
        # In float32 they turn a tied one over, before a layer computes.
        tied, keys = replace(QWEN_7B, tie_embeddings=True), {**keys, "model.dtype": "float32"}
        moments = memory.score_phase(large_run(**keys), tied, several).moments
        tables = [moments[moment][name] for moment in ("gathering", "layers")]
        assert tables == pytest.approx([2 * table, table], rel=1e-3)

    def test_what_a_device_has_of_its_own_is_not_gathered(self):
        keys = {"mesh.data": 1, "mesh.expert": 8, "optimizer.micro_rows": 8}
        config = large_run(fsdp=1, **keys)
        model = programs.MODELS["30b-a3b"]
        gathered = memory.update_phase(config, model, NODE, "train").moments["layers"]
        # Attention alone: 32 heads of queries, 4 of keys and values, and the router.
        values = 2048 * 128 * (2 * 32 + 2 * 4) + 2048 * 128
        assert gathered["layers gathered"] == pytest.approx(2 * 2 * values, rel=1e-3)

    def test_remat_and_sharding_save_what_they_should(self):
        peak = lambda **settings: train_phase(large_run(**settings)).peak  # noqa: E731
        assert peak() < peak(**{"model.remat": "none"})
        assert peak() < peak(fsdp=4)
        assert peak() < peak(**{"optimizer.micro_rows": 16})
        whole, halved = (train_phase(large_run(fsdp=4, tensor=t)).moments for t in (1, 2))
        layers = lambda remat: train_phase(large_run(**{"model.remat": remat})).moments["layers"]  # noqa: E731
        kept = "activations kept for the backward pass"
        # Of 28 layers as wide as attention's result, two are on their way.
        assert layers("offload")[kept] == pytest.approx(2 * 2 / 28 * layers("full")[kept], rel=0.01)
        # A device has one row, or a piece of one; half the heads are half the scores.
        assert whole["layers"]["attention scores"] == 2 * halved["layers"]["attention scores"]

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

    def test_rows_of_the_sampler_are_split_over_context_too(self):
        keys = {"mesh.data": 1, "mesh.context": 4, "optimizer.micro_rows": 2}
        memory.make_plan(large_run(fsdp=2, **keys), QWEN_7B, NODE)
        config = large_run(fsdp=2, **keys, **{"rollout.num_rows": 12})
        wrong = r"is 12; .* multiple of data \* fsdp \* expert \* context = 8"
        with pytest.raises(ValueError, match=wrong):
            memory.make_plan(config, QWEN_7B, NODE)


def test_a_cpu_has_a_chunk_of_logits_once():
    target = memory.Target(platform="cpu", num_devices=1, memory_bytes=80 * GIB)
    phase = train_phase(programs.small_run(1, 1, 1), programs.MODELS["tiny"], target)
    # 2048 tokens in one chunk, of which 128 have 2 MiB of logits, and twice as much beside them.
    assert phase.moments["output"]["logits chunk"] == (2048 + 2 * 128) * 4096 * 4


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
            assert planned == pytest.approx(compiled, rel=0.1), program

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
        instead="extras/plan/test_memory.py"
        "::TestByHand::test_a_tpu_makes_the_gradient_of_logits_as_it_multiplies"
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
    sampler = memory.rollout_phase(large_run(**AHEAD), QWEN_7B, NODE)
    moment = sum(sampler.moments[sampler.moment].values())
    more = sampler.kept["decode weights"] + sampler.kept["KV cache"] + moment
    assert beside.peak == alone.peak + more
    assert sampler.kept["KV cache"] > 3 * GIB


def test_by_default_its_cache_is_that_of_the_rows():
    config = large_run(**AHEAD | {"rollout.cache_gib": 0.0})
    after = large_run()
    on_cpu = replace(NODE, platform="cpu")
    page = {"xla": 16, "triton": 64}
    full = memory.cache_pages(after, QWEN_7B, on_cpu) * page["xla"]
    assert memory.cache_pages(config, QWEN_7B, NODE) * page["triton"] == pytest.approx(
        full, rel=0.1
    )
    assert memory.cache_pages(after, QWEN_7B, NODE) > memory.cache_pages(config, QWEN_7B, NODE)


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
    assert "decode weights" not in plan.between
    with pytest.raises(ValueError, match=r"num_rows is 63; .* rollout_devices / tensor, of all pr"):
        memory.make_plan(large_run(fsdp=6, **AHEAD | own | {"rollout.num_rows": 63}), QWEN_7B, NODE)


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
            assert kept["optimizer state"] == 8 * num + 8  # and two counters
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
    phase = memory.update_phase(config, TINY_MOE, target, "train")
    tokens = batch_shape(config, "train", 1).row_tokens
    held = experts.activations - experts.reused.get(platform, 0)
    assert phase.moments["layers"]["activations of a layer"] == tokens * (
        dense_bytes * dense.activations + expert_bytes * held
    )


def test_an_accelerator_puts_some_of_what_experts_compute_over_others():
    """By whole pairs and values inside: a GPU's compiler 5 and 4, a TPU's 3 and 2; forward 1, 2."""
    k, D, F = TINY_MOE.num_chosen, TINY_MOE.width, TINY_MOE.expert_width
    terms = TINY_MOE.expert_terms(1, 1)
    assert terms.activations - terms.reused["gpu"] == k * (5 * D + 4 * F)
    assert terms.activations - terms.reused["tpu"] == k * (3 * D + 2 * F)
    assert terms.read_activations - terms.read_reused == k * (D + 2 * F)
    config = resolved(settings(**{"model.dtype": "bfloat16", "optimizer.micro_rows": 1}))
    chip = memory.Target(platform="tpu", num_devices=1, memory_bytes=GIB)
    inner = TINY_MOE.memory_terms(1).read_activations + k * (D + 2 * F)
    tokens = batch_shape(config, "train", 0).row_tokens
    scoring = memory.score_phase(config, TINY_MOE, chip).moments["layers"]
    assert scoring["activations of a layer"] == 2 * tokens * inner
    reading = memory.rollout_phase(config, TINY_MOE, chip).moments["reading"]
    assert reading["activations"] == 2 * min(2048, config.rollout.max_total_tokens) * inner


def test_abstract_batches_have_what_images_and_replay_add():
    config = resolved(default_config())
    seeing = Model(golden()[0], one_device_mesh(), XLA, num_tokens=96)
    assert programs.abstract_batch(config, seeing).token_arrays.keys() == {"positions", "units"}
    config = config.with_values({"model.replay": True})
    mixed = Model(TINY_MOE, one_device_mesh(), XLA, num_tokens=NUM_TOKENS)
    batch = programs.abstract_batch(config, mixed)
    own = len(TINY_MOE.expert_layers), TINY_MOE.num_chosen
    assert batch.token_arrays["routed_experts"].shape == (*batch.token_ids.shape, *own)
    assert batch.token_arrays["routed_experts"].dtype == np.uint8
    assert batch.token_arrays.keys() == {"routed_experts"}

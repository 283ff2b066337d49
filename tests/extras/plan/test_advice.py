"""What to change so that a run fits: rows, settings, devices."""

from dataclasses import replace

import pytest

from jaxrl.builders.capacity import GIB, format_bytes
from jaxrl.builders.validation import validate
from jaxrl.extras.plan import advice, memory
from tests.extras.plan.cases import AHEAD, NODE, QWEN_7B, QWEN_32B, large_run, train_phase

CONTEXT = "rollout.context.max_tokens"


class TestMicroRows:
    def test_the_largest_that_fits(self):
        config = large_run(**{"optimizer.micro_rows": 0, "rollout.tasks_per_step": 64})
        rows, peak = advice.find_micro_rows(config, QWEN_7B, NODE, "train")
        usable = NODE.memory_bytes * memory.USABLE_SHARE
        assert rows % 8 == 0
        assert peak <= usable
        config.optimizer.micro_rows = rows
        assert train_phase(config).peak == peak
        for more in (rows + 8, 2 * rows):
            config.optimizer.micro_rows = more
            assert train_phase(config).peak > usable

    def test_no_more_than_a_batch_needs(self):
        endless = replace(NODE, memory_bytes=10**15)
        config = large_run(**{"optimizer.micro_rows": 0, "optimizer.num_minibatches": 2})
        assert advice.find_micro_rows(config, QWEN_7B, endless, "train")[0] == 16 * 8 // 2

    @pytest.mark.parametrize(
        ("row_tokens", "rows"), [(64, 8), (100, 6), (288, 2), (512, 2), (4096, 2)]
    )
    def test_a_cpu_takes_few_tokens_and_two_rows_at_least(self, row_tokens, rows):
        cpu = replace(NODE, platform="cpu", num_devices=1, memory_bytes=10**15)
        keys = {"rollout.max_prompt_tokens": 32, "rollout.max_total_tokens": row_tokens}
        config = large_run(fsdp=1, **keys, **{"optimizer.micro_rows": 0})
        assert advice.find_micro_rows(config, QWEN_7B, cpu, "train")[0] == rows

    def test_a_cpu_takes_fewer_where_they_do_not_fit_or_are_not_needed(self):
        cpu = replace(NODE, platform="cpu", num_devices=1, memory_bytes=10**15)
        config = large_run(fsdp=1, **{"optimizer.micro_rows": 0})
        peaks = [
            train_phase(config.with_values({"optimizer.micro_rows": rows}), target=cpu).peak
            for rows in (1, 2)
        ]
        tight = replace(cpu, memory_bytes=round(sum(peaks) / 2 / memory.USABLE_SHARE))
        assert advice.find_micro_rows(config, QWEN_7B, tight, "train") == (1, peaks[0])
        config = config.with_values({"stages": ("sft",), "sft.batch_size": 1})
        assert advice.find_micro_rows(config, QWEN_7B, cpu, "sft")[0] == 1

    def test_where_nothing_fits(self):
        small = replace(NODE, memory_bytes=16 * GIB)
        with pytest.raises(
            ValueError, match=r"config.optimizer.micro_rows=0 selects .* 8 rows, one"
        ):
            advice.choose_micro_rows(large_run(**{"optimizer.micro_rows": 0}), QWEN_7B, small)


class TestAdvice:
    def test_every_advice_fits_and_is_the_least_change(self):
        config = large_run(**{"optimizer.micro_rows": 512, "rollout.max_total_tokens": 4096})
        plan = lambda **keys: memory.make_plan(config.with_values(keys), QWEN_7B, NODE)  # noqa: E731
        assert not plan().fits
        found = advice.suggest_settings(config, QWEN_7B, NODE)
        assert {"optimizer.micro_rows": 128} in [one.settings for one in found]
        assert not plan(**{"optimizer.micro_rows": 256}).fits
        for one in found:
            changed = plan(**one.settings)
            assert (changed.needed, changed.fits) == (one.needed, True)
        # The sampler's cache takes what is left, so that all plans that fit have one peak. What
        # they need differs, and leaves headroom.
        needed = [format_bytes(one.needed) for one in found]
        assert len({*needed}) == len(needed) > 1
        assert all(one.needed < NODE.usable for one in found)

    def test_rows_stay_multiples_of_what_the_mesh_divides(self):
        # A half and a quarter of 72 are 36 and 18, which eight devices would not divide.
        assert advice._list_halvings(72, unit=8) == [32, 16, 8]
        assert advice._list_halvings(2048, least=1025) == []
        config = large_run(**{"optimizer.micro_rows": 72, "rollout.max_total_tokens": 16384})
        assert not memory.make_plan(config, QWEN_7B, NODE).fits
        found = advice.suggest_settings(config, QWEN_7B, NODE)
        assert {"optimizer.micro_rows": 32} in [one.settings for one in found]

    def test_decoded_rows_stay_multiples_too(self):
        config = large_run(**{"rollout.max_num_seqs": 72, "rollout.cache_gib": 100.0})
        tried = all_tried(config)
        assert [o["rollout.max_num_seqs"] for o in tried if "rollout.max_num_seqs" in o] == [
            32,
            16,
            8,
        ]
        assert {"rollout.cache_gib": 0.0} in tried

    def test_advice_on_contexts_is_none_that_a_run_refuses(self):
        config = large_run(
            **{"rollout.max_total_tokens": 65536, "rollout.context.max_tokens": 32768},
            **{"rollout.context.name": "last_turns"},
        )
        tried = all_tried(config)
        contexts = [o[CONTEXT] for o in tried if CONTEXT in o]
        assert contexts[:2] == [16384, 8192]
        assert (
            min(contexts) >= config.rollout.max_prompt_tokens + config.rollout.context.turn_tokens
        )
        totals = [o["rollout.max_total_tokens"] for o in tried if "rollout.max_total_tokens" in o]
        assert totals == [32768]

    def test_the_tensor_axis_stays_inside_a_process(self):
        tried = all_tried(large_run(), QWEN_32B, replace(NODE, num_processes=4))
        grown = [option for option in tried if option.get("mesh.data") == 1]
        assert {option["mesh.tensor"] for option in grown if "mesh.tensor" in option} == {2}

    def test_weights_copied_to_every_device_are_split(self):
        # 12 of state and 4 of gradients a parameter: 114 GiB on every device, 57 on halves.
        found = advice.suggest_settings(large_run(fsdp=1, **{"mesh.data": 8}), QWEN_7B, NODE)
        assert {"mesh.data": 2, "mesh.fsdp": 4, "mesh.tensor": 1} in [a.settings for a in found]

    def test_a_tensor_axis_takes_fewer_rows_with_it(self):
        # Decode weights are whole on every device unless two share them; then a micro-batch of as
        # many rows would have two for each pair.
        keys = {"optimizer.micro_rows": 8, "rollout.max_total_tokens": 16384, "kl.coef": 0.01}
        config, node = (
            large_run(**keys, **{"rollout.max_num_seqs": 8}),
            replace(NODE, memory_bytes=34 * GIB),
        )
        assert not memory.make_plan(config, QWEN_7B, node).fits
        mesh = {"mesh.data": 1, "mesh.fsdp": 4, "mesh.tensor": 2}
        found = advice.suggest_settings(config, QWEN_7B, node)
        assert {**mesh, "optimizer.micro_rows": 4} in [one.settings for one in found]

    def test_more_devices_where_no_setting_helps(self):
        config = large_run()
        # 32.8e9 parameters of 16 bytes are 61 GiB on each of 8, without weights to multiply with.
        # Even with the moments on the host it is 8 of them, and 2 of 8 GiB more for each device.
        small = replace(NODE, memory_bytes=40 * GIB)
        assert advice.suggest_settings(config, QWEN_32B, small) == []
        assert advice.find_num_devices(config, QWEN_32B, small) == 16


def keys_tried(config, target=NODE):
    """The first key of what is tried, in its order."""
    return [
        next(iter(tried[0])) for tried in advice._iter_options(config, QWEN_7B, target) if tried
    ]


def all_tried(config, model=QWEN_7B, target=NODE):
    """Every change that is tried."""
    return [one for options in advice._iter_options(config, model, target) for one in options]


class TestWhatElseThereIs:
    """Moments, one step ahead: what the plan tries beside sizes."""

    def test_the_order_is_that_of_what_it_costs_in_time(self):
        keys = {"model.remat": "none", "optimizer.micro_rows": 16}
        assert keys_tried(large_run(**AHEAD, **keys)) == [
            "optimizer.moments_dtype",
            "rollout.async_level",
            "optimizer.micro_rows",
            "model.logits_chunk_tokens",
            "optimizer.offload",
            "model.remat",
            "rollout.cache_gib",
            "rollout.max_num_seqs",
            "rollout.async_level",
            "mesh.data",  # with a larger context, a larger tensor, and that with fewer rows
            "mesh.data",
            "mesh.data",
        ]

    def test_moments_of_every_stage_that_runs(self):
        config = large_run(stages=("sft", "train", "evaluate"))
        assert {"sft.optimizer.offload": True, "optimizer.offload": True} in all_tried(config)
        assert "optimizer.offload" not in keys_tried(large_run(), replace(NODE, platform="cpu"))

    def test_moments_make_room_where_they_are_enough(self):
        config = large_run(**{"rollout.cache_gib": 1.0})
        peak = memory.make_plan(config, QWEN_7B, NODE).peak
        # 7.6e9 parameters on eight devices: two bytes less each are 1.77 GiB, eight are 7.1.
        wanted = {"optimizer.moments_dtype": "bfloat16"}, {"optimizer.offload": True}
        for less, helps in ((1.7, (True, True)), (7.0, (False, True)), (7.2, (False, False))):
            memory_bytes = round((peak - less * GIB) / memory.USABLE_SHARE)
            found = advice.suggest_settings(
                config, QWEN_7B, replace(NODE, memory_bytes=memory_bytes)
            )
            settings = [one.settings for one in found]
            assert tuple(one in settings for one in wanted) == helps

    def test_a_run_ahead_may_wait_or_sample_on_devices_of_its_own(self):
        config = large_run(**AHEAD, **{"rollout.max_num_seqs": 72})
        alone = memory.make_plan(config.with_values({"rollout.async_level": 0}), QWEN_7B, NODE)
        assert memory.make_plan(config, QWEN_7B, NODE).peak > alone.peak
        found = advice.suggest_settings(config, QWEN_7B, target_of(alone.peak))
        settings = [one.settings for one in found]
        assert settings[0] == {"rollout.async_level": 0}
        [own] = [one for one in settings if one.get("mesh.rollout_devices")]
        assert own == {
            "rollout.async_level": 1,
            "mesh.rollout_devices": 1,
            "mesh.data": 1,
            "mesh.fsdp": 7,  # which divides the width of 3584
            "mesh.tensor": 1,
            "rollout.max_num_seqs": 72,
            "optimizer.micro_rows": 7,
        }
        for one in found:
            validate(config.with_values(one.settings).config, needs_data=False)

    def test_devices_that_only_sample_may_be_fewer_or_none(self):
        own = {"mesh.data": 1, "mesh.rollout_devices": 4, "optimizer.micro_rows": 4}
        config = large_run(fsdp=4, **AHEAD, **own, **{"rollout.max_num_seqs": 8})
        config.rollout.max_num_seqs = 6  # of which four devices would not get as many each
        [divisions] = [
            tried
            for tried in advice._iter_options(config, QWEN_7B, NODE)
            if any("mesh.rollout_devices" in one for one in tried)
        ]
        assert [one["mesh.rollout_devices"] for one in divisions] == [1, 2, 0]
        assert [one["mesh.fsdp"] for one in divisions] == [7, 6, 8]
        # As many rows on each device that trains; those sampled divide over the others.
        assert [one["optimizer.micro_rows"] for one in divisions] == [7, 6, 8]
        assert [one["rollout.max_num_seqs"] for one in divisions] == [6, 6, 8]
        assert [one["rollout.async_level"] for one in divisions] == [1, 1, 0]
        for one in divisions:
            changed = config.with_values(one)
            validate(changed.config, needs_data=False)
            memory.make_plan(changed, QWEN_7B, NODE)


def target_of(usable):
    """A node whose devices may be filled so far."""
    return replace(NODE, memory_bytes=round(usable / memory.USABLE_SHARE) + 2)

"""Suggested rows and settings with which a run fits."""

from dataclasses import replace

import pytest

from jaxrl.builders.capacity import GIB
from jaxrl.builders.validation import validate
from jaxrl.extras.plan import advice, memory
from tests.extras.plan.cases import AHEAD, NODE, QWEN_7B, QWEN_32B, large_run, train_phase


class TestMicroRows:
    def test_the_largest_that_fits(self):
        config = large_run(**{"optimizer.micro_rows": 0, "rollout.tasks_per_step": 64})
        rows, peak = advice.find_micro_rows(config, QWEN_7B, NODE, "train")
        usable = NODE.memory_bytes * memory.USABLE_SHARE
        assert rows % 8 == 0
        assert peak <= usable
        config.optimizer.micro_rows = rows
        assert train_phase(config).peak_bytes == peak
        for more in (rows + 8, 2 * rows):
            config.optimizer.micro_rows = more
            assert train_phase(config).peak_bytes > usable

    def test_no_more_than_a_batch_needs(self):
        endless = replace(NODE, memory_bytes=10**15)
        config = large_run(**{"optimizer.micro_rows": 0, "optimizer.num_minibatches": 2})
        assert advice.find_micro_rows(config, QWEN_7B, endless, "train")[0] == 16 * 8 // 2

    @pytest.mark.parametrize(("row_tokens", "rows"), [(64, 8), (100, 6), (4096, 2)])
    def test_a_cpu_takes_few_tokens_and_two_rows_at_least(self, row_tokens, rows):
        cpu = replace(NODE, platform="cpu", num_devices=1, memory_bytes=10**15)
        keys = {"rollout.max_prompt_tokens": 32, "rollout.max_total_tokens": row_tokens}
        config = large_run(fsdp=1, **keys, **{"optimizer.micro_rows": 0})
        assert advice.find_micro_rows(config, QWEN_7B, cpu, "train")[0] == rows

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
        suggestions = advice.suggest_settings(config, QWEN_7B, NODE)
        assert {"optimizer.micro_rows": 128} in [each.settings for each in suggestions]
        assert not plan(**{"optimizer.micro_rows": 256}).fits
        for suggestion in suggestions:
            changed = plan(**suggestion.settings)
            assert (changed.needed_bytes, changed.fits) == (suggestion.needed_bytes, True)
            # The sampler's cache takes what is left, so what a plan needs leaves headroom.
            assert suggestion.needed_bytes < NODE.usable_bytes

    def test_rows_stay_multiples_of_what_the_mesh_divides(self):
        # A half and a quarter of 72 are 36 and 18, which eight devices would not divide.
        config = large_run(**{"optimizer.micro_rows": 72, "rollout.max_total_tokens": 16384})
        assert {"optimizer.micro_rows": 32} in suggest(config, QWEN_7B, NODE)
        config = large_run(**{"rollout.max_num_seqs": 72, "rollout.cache_gib": 100.0})
        assert tried_values(config, "rollout.max_num_seqs") == [32, 16, 8]
        assert tried_values(config, "rollout.cache_gib")[-1] == 0.0

    def test_weights_copied_to_every_device_are_split(self):
        # 12 of state and 4 of gradients a parameter: 114 GiB on every device, 57 on halves.
        config = large_run(fsdp=1, **{"mesh.data": 8})
        split = {"mesh.data": 2, "mesh.fsdp": 4, "mesh.tensor": 1}
        assert split in suggest(config, QWEN_7B, NODE)

    def test_more_devices_where_no_setting_helps(self):
        config = large_run()
        # 32.8e9 parameters of 16 bytes are 61 GiB on each of 8, without weights to multiply with.
        # Even with the moments on the host it is 8 of them, and 2 of 8 GiB more for each device.
        small = replace(NODE, memory_bytes=40 * GIB)
        assert advice.suggest_settings(config, QWEN_32B, small) == []
        assert advice.find_num_devices(config, QWEN_32B, small) == 16


def suggest(config, model, target):
    """Return the settings of all suggestions."""
    return [each.settings for each in advice.suggest_settings(config, model, target)]


def all_tried(config, model=QWEN_7B, target=NODE):
    """Return all settings that the search tries."""
    return [each for options in advice._iter_options(config, model, target) for each in options]


def tried_values(config, key, target=NODE):
    return [option[key] for option in all_tried(config, target=target) if key in option]


class TestOtherOptions:
    """The search also tries bfloat16 moments and synchronous sampling."""

    def test_a_run_ahead_may_wait_or_sample_on_devices_of_its_own(self):
        config = large_run(**AHEAD, **{"rollout.max_num_seqs": 72})
        alone = memory.make_plan(config.with_values({"rollout.async_level": 0}), QWEN_7B, NODE)
        assert memory.make_plan(config, QWEN_7B, NODE).peak_bytes > alone.peak_bytes
        # A node whose devices may be filled just so far.
        memory_bytes = round(alone.peak_bytes / memory.USABLE_SHARE) + 2
        settings = suggest(config, QWEN_7B, replace(NODE, memory_bytes=memory_bytes))
        assert settings[0] == {"rollout.async_level": 0}
        [devices] = [option for option in settings if option.get("mesh.rollout_devices")]
        assert devices == {
            "rollout.async_level": 1,
            "mesh.rollout_devices": 1,
            "mesh.data": 1,
            "mesh.fsdp": 7,  # which divides the width of 3584
            "mesh.tensor": 1,
            "rollout.max_num_seqs": 72,
            "optimizer.micro_rows": 7,
        }
        for option in settings:
            validate(config.with_values(option).config, needs_data=False)

"""Quantities of tokens against the losses that training has, and texts of pieces of characters."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.config.schema import default_config, to_json
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.extras.view.tokens import Tokens, Vocabulary, quantities
from jaxrl.objectives.losses import cispo_policy_loss, clipped_policy_loss, gspo_policy_loss
from jaxrl.utils.text import printable
from tests.extras.view.made import LISTS, drawn_record
from tests.qwen import qwen3

TOKENIZER = qwen3()
CONFIG = {
    "loss.name": "clip",
    "loss.clip_low": 0.2,
    "loss.clip_high": 0.28,
    "loss.clip.dual_clip": 0.0,
    "loss.mask_observations": True,
}
SIZE = 128
RANGE = {"clip_low": 0.2, "clip_high": 0.28}


def of(record, **changes):
    """Quantities by name."""
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return {one.name: one for one in quantities(Tokens.of(record), CONFIG | named)}


def by_hand(**lists):
    """Four tokens, of which the last three were sampled."""
    fields = {"token_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1], "advantage": 0.5}
    return fields | lists


def test_by_hand():
    found = of(
        by_hand(
            rollout_logprobs=[0.0, -1.0, -2.0, -3.0],
            rollout_entropies=[0.0, 0.5, 0.25, 1.5],
            old_logprobs=[0.0, -1.125, -2.0, -2.5],
            new_logprobs=[0.0, -1.125, -1.5, -3.5],
            ref_logprobs=[0.0, -1.0, -2.0, -3.0],
            kl_weights=[0.0, 0.01, 0.02, 0.03],
            token_weights=[0.0, 0.25, 0.25, 0.5],
        )
    )
    nan = np.nan
    expected = {
        "advantage": [nan, 0.5, 0.5, 0.5],
        "entropy": [nan, 0.5, 0.25, 1.5],
        "logprob": [nan, -1.0, -2.0, -3.0],
        "reference": [nan, -0.125, 0.5, -0.5],
        "ratio": [nan, 1.0, np.exp(0.5), np.exp(-1.0)],
        # exp(0.5) is above 1.28 and the advantage is positive; exp(-1) is below 0.8, where only a
        # negative one would matter.
        "clip": [nan, 0.0, 1.0, 0.0],
        "gap": [nan, -0.125, 0.0, 0.5],
        "kl_weight": [nan, 0.01, 0.02, 0.03],
        "token_weight": [nan, 0.25, 0.25, 0.5],
    }
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name].values, values, rtol=1e-12)
    assert found["clip"].label == "clipped: the ratio outside 0.8 to 1.28"


@pytest.mark.parametrize("loss", ["clip", "dual", "gspo", "cispo"])
def test_clipped_tokens_are_those_that_the_loss_counts(loss):
    rng = np.random.default_rng(0)
    for number in range(20):
        record = drawn_record(rng, TOKENIZER)
        shift = 0.5 * rng.normal()  # of whole trajectories, for gspo
        mask = np.array(record["loss_mask"], bool)
        new = np.array(record["old_logprobs"]) + mask * (0.3 * rng.normal(size=len(mask)) + shift)
        record["new_logprobs"] = new.round(6).tolist()
        # All of one size, so that each loss is compiled once.
        is_there = np.arange(SIZE)[None] < len(mask)
        names = ("new_logprobs", "old_logprobs", "token_advantages")
        arrays = [
            np.resize(np.array(values, kind), (1, SIZE)) * is_there
            for values, kind in [*((record[name], np.float32) for name in names), (mask, bool)]
        ]
        if loss == "gspo":
            told = gspo_policy_loss(*arrays, is_there.astype(np.int32), **RANGE)
        elif loss == "cispo":
            told = cispo_policy_loss(*arrays, **RANGE)
        else:
            told = clipped_policy_loss(*arrays, **RANGE, dual_clip=1.5 * (loss == "dual"))
        name = "clip" if loss == "dual" else loss
        dual = {"loss__clip__dual_clip": 1.5} if loss == "dual" else {}
        found = of(record, loss__name=name, **dual)["clip"].values
        assert np.isnan(found[~mask]).all()
        counted = {
            name: np.array(told.metrics.get(name, np.zeros((1, SIZE))))[0, : len(mask)] == 1
            for name in ("pg_clipfrac", "pg_clipfrac_lower")
        }
        is_lower = counted["pg_clipfrac_lower"]
        np.testing.assert_array_equal(found[mask] == 2, is_lower[mask], f"record {number}")
        is_clipped = counted["pg_clipfrac"] & ~is_lower
        np.testing.assert_array_equal(found[mask] == 1, is_clipped[mask])


class TestLacking:
    @pytest.mark.parametrize("name", ["reference", "ratio", "clip", "gap", "token_weight"])
    def test_it_is_told_what_would_record_it(self, name):
        record = drawn_record(np.random.default_rng(0), TOKENIZER, has_lists=False)
        found = of(record, loss__name="clip")[name]
        assert found.values is None
        assert "config.log.tokens" in found.why

    def test_what_the_record_has_always_is_there(self):
        record = drawn_record(np.random.default_rng(0), TOKENIZER, has_lists=False, advantage=1.5)
        found = of(record)
        assert {n for n, q in found.items() if q.values is not None} == {
            *("advantage", "entropy", "logprob"),
        }

    @pytest.mark.parametrize("name", LISTS)
    def test_a_list_of_another_length(self, name):
        record = by_hand(**dict.fromkeys(LISTS, [0.0] * 4), rollout_logprobs=[0.0] * 4)
        record[name] = [0.0] * 3
        lacking = [one for one in of(record).values() if one.values is None]
        assert any(f"{name} is not as the tokens are: 3 for 4 tokens" in q.why for q in lacking)

    def test_of_another_loss_the_range_is_not_known(self):
        record = by_hand(**dict.fromkeys(LISTS, [0.0] * 4))
        found = of(record, loss__name="my_package.loss")["clip"]
        assert (found.values, "my_package.loss" in found.why) == (None, True)

    def test_values_that_are_no_numbers_are_gaps(self):
        record = by_hand(token_weights=[0.0, None, "1", 0.5])
        np.testing.assert_array_equal(of(record)["token_weight"].values[1:], [np.nan, np.nan, 0.5])

    @pytest.mark.parametrize(
        "changes", [{"token_ids": [1]}, {"loss_mask": None}, {"token_ids": ["1"]}]
    )
    def test_tokens_that_do_not_fit(self, changes):
        with pytest.raises(ValueError, match="the line is damaged"):
            Tokens.of(by_hand(**changes))


class TestAdvantages:
    def test_of_turns(self):
        record = by_hand(turn_advantages=[1.0, -2.0]) | {"loss_mask": [1, 1, 0, 1]}
        np.testing.assert_array_equal(of(record)["advantage"].values, [1.0, 1.0, np.nan, -2.0])

    def test_of_turns_that_cannot_be_told_apart(self):
        found = of(by_hand(turn_advantages=[1.0, -2.0]))["advantage"]
        assert found.values is None
        assert "the 2 turns have advantages of their own, and 1 runs" in found.why

    def test_of_tokens_come_first(self):
        record = by_hand(turn_advantages=[1.0, -2.0], token_advantages=[0.0, 1.0, -2.0, -2.0])
        np.testing.assert_array_equal(of(record)["advantage"].values[1:], [1.0, -2.0, -2.0])

    def test_of_a_failed_episode(self):
        assert "no advantage" in of(by_hand() | {"advantage": None})["advantage"].why


def test_observations_that_are_trained_on_have_no_gap():
    lists = {"rollout_logprobs": [0.0, 0.0, -1.0, -1.0], "old_logprobs": [0.0, -3.0, -1.5, -1.0]}
    found = of(by_hand(**lists), loss__mask_observations=False)["gap"].values
    np.testing.assert_array_equal(found, [np.nan, np.nan, -0.5, 0.0])


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run")
    TOKENIZER.save_pretrained(workdir / "export")
    return Vocabulary.of(workdir, {})


class TestTexts:
    def test_bytes_are_those_of_the_tokenizer(self, vocabulary):
        assert vocabulary.bytes == Tokenizer(TOKENIZER).vocab_bytes

    @given(text=st.text(st.characters(codec="utf-8")))
    def test_together_they_are_the_text(self, vocabulary, text):
        shown = vocabulary.texts(Tokenizer(TOKENIZER).encode_plain(text))
        assert "".join(one["text"] for one in shown) == printable(text)

    def test_a_character_stands_at_the_token_that_begins_it(self, vocabulary):
        ids = [vocabulary.bytes.index(bytes([byte])) for byte in "a字b".encode()]
        assert vocabulary.texts(ids) == [
            {"text": "a"},
            {"text": "字", "bytes": "e5"},
            {"text": "", "bytes": "ad"},
            {"text": "", "bytes": "97"},
            {"text": "b"},
        ]

    def test_bytes_that_are_no_text(self, vocabulary):
        ids = [vocabulary.bytes.index(bytes([byte])) for byte in (0xE5, 0x41, 0x97)]
        assert [one["text"] for one in vocabulary.texts(ids)] == ["\ufffd", "A", "\ufffd"]

    def test_what_hides_or_turns_is_shown_by_its_code(self, vocabulary):
        ids = Tokenizer(TOKENIZER).encode_plain("a\u202eb\x1b")
        shown = "".join(one["text"] for one in vocabulary.texts(ids))
        assert shown == r"a\u202eb\x1b"

    def test_ids_beyond_the_vocabulary(self, vocabulary):
        shown = vocabulary.texts([len(vocabulary.bytes), -1])
        assert [one["text"] for one in shown] == [f"[id {len(vocabulary.bytes)}]", "[id -1]"]

    def test_without_a_tokenizer_there_are_ids(self, tmp_path):
        found = Vocabulary.of(tmp_path, {"model.path": "nowhere"})
        assert found.bytes == []
        assert found.source.startswith("no tokenizer: ")
        assert [one["text"] for one in found.texts([3, 4])] == ["3 ", "4 "]

    def test_a_relative_path_is_of_the_folder_where_the_run_began(self, tmp_path):
        TOKENIZER.save_pretrained(tmp_path / "began" / "model")
        workdir = tmp_path / "run"
        workdir.mkdir()
        (workdir / "environment.json").write_text(json.dumps([{"folder": str(tmp_path / "began")}]))
        found = Vocabulary.of(workdir, {"model.path": "model"})
        assert found.source == str(tmp_path / "began" / "model" / "tokenizer.json")


def test_the_keys_that_are_read_exist():
    config = json.loads(to_json(default_config()))
    for key in CONFIG:
        value = config
        for part in key.split("."):
            value = value[part]

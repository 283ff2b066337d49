"""Quantities of tokens, by hand, and their texts."""

import math

import pytest

from jaxrl.data.tokenizer import Tokenizer
from jaxrl.extras.view.tokens import Tokens, compute_quantities, decode_tokens, load_vocabulary
from jaxrl.utils.text import escape_control_chars
from tests.extras.view.workdirs import TOKENIZER, make_run, trajectory, view, write_trajectories

LISTS = {
    "rollout_logprobs": [0.0, -1.0, -2.0, -3.0],
    "rollout_entropies": [0.0, 0.5, 0.25, 1.5],
    "old_logprobs": [0.0, -1.125, -2.0, -2.5],
    "new_logprobs": [0.0, -1.125, -1.5, -3.5],
    "ref_logprobs": [0.0, -1.0, -2.0, -3.0],
    "kl_weights": [0.0, 0.01, 0.02, 0.03],
    "token_weights": [0.0, 0.25, 0.25, 0.5],
}


def record(**lists):
    """Four tokens, of which the last three were sampled."""
    return {"token_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1], "advantage": 0.5} | lists


def values_of(fields):
    rows = compute_quantities(Tokens.from_record(fields))
    return {row["name"]: row["values"] for row in rows}


class TestQuantities:
    def test_by_hand(self):
        expected = {
            "advantage": [None, 0.5, 0.5, 0.5],
            "logprob": [None, -1.0, -2.0, -3.0],
            "entropy": [None, 0.5, 0.25, 1.5],
            "ratio": [None, 1.0, pytest.approx(math.exp(0.5), 1e-4), pytest.approx(0.36788, 1e-4)],
            "reference": [None, -0.125, 0.5, -0.5],
            "gap": [None, -0.125, 0.0, 0.5],
            "kl_weight": [None, 0.01, 0.02, 0.03],
            "weight": [None, 0.25, 0.25, 0.5],
        }
        assert values_of(record(**LISTS)) == expected

    @pytest.mark.parametrize("changes", [{"token_ids": [1]}, {"loss_mask": None}])
    def test_damaged_tokens_are_rejected(self, changes):
        with pytest.raises(ValueError, match="line damaged"):
            Tokens.from_record(record(**changes))


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run")
    TOKENIZER.save_pretrained(workdir / "export")
    return load_vocabulary(workdir, {})[0]


class TestTexts:
    @pytest.mark.parametrize("text", ["Élysée, Straße 字 𝒳\n", "a\u202eb\x1b", ""])
    def test_together_they_are_the_text(self, vocabulary, text):
        assert vocabulary == Tokenizer(TOKENIZER).vocab_bytes
        assert "".join(decode_tokens(Tokenizer(TOKENIZER).encode_plain(text), vocabulary)) == text

    def test_a_split_character_belongs_to_the_token_that_ends_it(self, vocabulary):
        ids = [vocabulary.index(bytes([byte])) for byte in "a字b".encode()]
        assert decode_tokens(ids, vocabulary) == ["a", "", "", "字", "b"]
        ids = [vocabulary.index(bytes([byte])) for byte in (0xE5, 0x41, 0x97)]
        assert decode_tokens(ids, vocabulary) == ["", "\ufffdA", "\ufffd"]

    def test_unknown_ids_and_a_missing_tokenizer(self, vocabulary, tmp_path):
        assert decode_tokens([-1, 2**40], vocabulary) == ["[id -1]", f"[id {2**40}]"]
        empty, problem = load_vocabulary(tmp_path, {"model.path": "nowhere"})
        assert (empty, decode_tokens([3, 4], empty)) == ([], ["3 ", "4 "])
        assert problem.startswith("No tokenizer")


def test_a_trajectory_is_its_record_with_its_tokens(tmp_path):
    run = make_run(tmp_path / "run")
    write_trajectories(run)
    answer = view(run).respond("trajectory/0/4/3")
    expected = trajectory("task 1", reward=1.0, advantage=0.5)
    assert answer["ids"] == expected["token_ids"]
    assert answer["is_sampled"] == expected["loss_mask"]
    assert "".join(answer["texts"]) == escape_control_chars(TOKENIZER.decode(expected["token_ids"]))
    assert answer["record"]["turns"] == expected["turns"]
    assert not {"token_ids", "loss_mask", "rollout_logprobs"} & answer["record"].keys()
    assert answer["problem"] == ""

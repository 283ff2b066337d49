"""The engine with `top_p`, compared with the same engine without."""

import functools

import jax
import numpy as np
import pytest

from jaxrl.sampling.engine import Request
from jaxrl.sampling.next_token import FULL, GREEDY, KINDS, filter_top_p
from jaxrl.sampling.sample_keys import derive_sample_keys
from tests.helpers import dense_table, tiny_params
from tests.toys import SMALL, Player, chain, toy_tokenizer

pytestmark = pytest.mark.usefixtures("quick_compilation")

TOKENIZER = toy_tokenizer(*chain("</search>"))
PARAMS = tiny_params(SMALL, seed=0)
PROMPT = (5, 3, 9)
table_jit = jax.jit(dense_table, static_argnums=1, static_argnames=("num_tokens", "temperature"))


@functools.cache
def engine(filter_top_p):
    """Small, with one row size, since each compiles; of all kinds, or of all but one."""
    settings = {"max_prompt_tokens": 16, "max_total_tokens": 32, "chunk_tokens": 6}
    kinds = KINDS if filter_top_p else (GREEDY, FULL)
    made = Player(SMALL, TOKENIZER, ("\x00",), num_rows=1, kinds=kinds, **settings).engine
    made.set_weights(PARAMS)
    return made


def play(engine, *, top_p=1.0, temperature=1.0, seeds=6):
    """Token ids, log-probabilities and entropies of some samples of one prompt."""
    out = []
    for seed in range(seeds):
        (key,) = derive_sample_keys(seed, 0, 0, *np.zeros((3, 1), np.int32))
        request = Request(prompt_ids=PROMPT, sample_key=key, budget=6)
        engine.submit([request], temperature=temperature, top_p=top_p)
        (event,) = engine.step()
        out.append((event.token_ids.tolist(), event.logprobs, event.entropies))
        engine.finish(event.request)
    return out


def same(first, second):
    for (ids, *numbers), (other_ids, *other_numbers) in zip(first, second, strict=True):
        assert ids == other_ids
        np.testing.assert_allclose(numbers, other_numbers, atol=1e-6)


def test_off_and_one_and_greedy():
    same(play(engine(True)), play(engine(False)))
    greedy = play(engine(False), temperature=0.0, seeds=1)
    same(play(engine(True), temperature=0.0, top_p=0.5, seeds=1), greedy)
    same([(ids,) for ids, *_ in play(engine(True), top_p=1e-9, seeds=2)], [(greedy[0][0],)] * 2)


@pytest.mark.parametrize(("top_p", "temperature"), [(0.3, 1.0), (0.7, 0.6)])
def test_draws_from_the_nucleus_and_reports_the_whole(top_p, temperature):
    for ids, logprobs, entropies in play(engine(True), top_p=top_p, temperature=temperature):
        whole = np.asarray(
            table_jit(
                PARAMS, SMALL, np.array([*PROMPT, *ids]),
                num_tokens=TOKENIZER.num_tokens, temperature=temperature,
            )
        )[len(PROMPT) - 1 : -1]  # fmt: skip
        weights = np.exp(whole - whole.max(axis=1, keepdims=True))
        kept = np.asarray(filter_top_p(weights, np.float32(top_p))) > 0
        assert kept[np.arange(len(ids)), ids].all()
        assert not kept.all()
        np.testing.assert_allclose(logprobs, whole[np.arange(len(ids)), ids], atol=1e-4)
        np.testing.assert_allclose(entropies, -(np.exp(whole) * whole).sum(axis=1), atol=1e-4)


def test_another_top_p_compiles_nothing():
    made = engine(True)
    play(made, top_p=0.9, seeds=1)
    before = made.num_compilations
    play(made, top_p=0.8, temperature=0.5, seeds=2)
    assert made.num_compilations == before

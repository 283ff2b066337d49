"""Planned device memory of dense retrieval: passages, encoder and searches."""

import jax
import numpy as np

from jaxrl.extras.dense.encoder import Encoder
from jaxrl.extras.dense.encoders import read_embedding_model
from jaxrl.extras.dense.memory import count_search_bytes
from jaxrl.extras.dense.passages import PassageIndex
from jaxrl.extras.plan import memory
from tests.extras.dense.worlds import ENCODER, PREFIXES, write_corpus
from tests.extras.plan.cases import NODE, QWEN_7B, large_run

WIKIPEDIA = 21_015_324  # passages of Wikipedia 2018, of E5's 768 values
GB = 10**9


def dense_run(**keys):
    usual = {"search.engine": "dense", "search.dense.encoder": "configs/models/e5-base-v2"}
    return large_run(**{**usual, **keys})


def test_a_plan_has_room_for_the_search():
    target = memory.Target(**{**NODE.__dict__, "num_passages": WIKIPEDIA})
    kl = {"kl.coef": 0.01}  # so that it scores
    config, without = dense_run(**{"search.dense.dtype": "int8"}, **kl), large_run(**kl)
    plan, bare = (memory.make_plan(each, QWEN_7B, target) for each in (config, without))
    held, working = count_search_bytes(config, WIKIPEDIA, 8, "gpu")
    update, rollout = plan.phases
    for phase in plan.phases:
        assert {name: phase.persistent[name] for name in held} == held
    assert update.peak_bytes == bare.phases[0].peak_bytes + sum(held.values())
    assert rollout.persistent["searching"] == working["searching"]
    # The cache takes what is left of a device: it has less by what the search takes.
    assert rollout.peak_bytes <= target.usable_bytes
    assert rollout.persistent["KV cache"] <= bare.phases[-1].persistent["KV cache"]
    on_cpu = memory.make_plan(dense_run(**{"search.dense.devices": "cpu"}, **kl), QWEN_7B, target)
    assert on_cpu.peak_bytes == bare.peak_bytes


def test_passages_are_counted_where_nobody_says(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", 500)
    config = dense_run(**{"search.dense.corpus": str(corpus)})
    assert count_search_bytes(config, 0, 1, "gpu") == count_search_bytes(config, 500, 1, "gpu")


def test_it_is_what_an_engine_holds(quick_compilation):
    config = dense_run(**{"search.dense.encoder": str(ENCODER), "search.dense.dtype": "int8"})
    held, _ = count_search_bytes(config, 700, 1, "cpu")
    model = read_embedding_model(ENCODER, **PREFIXES)
    encoder = Encoder(model, ENCODER, jax.devices()[:1], dtype="float32")
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(encoder._params))
    vectors = np.ones((700, 32), np.float32)
    passages = PassageIndex(vectors, jax.devices()[:1], dtype="int8")
    index = passages._passages.nbytes + passages._scales.nbytes
    assert held == {"search index": index, "search encoder": weights}

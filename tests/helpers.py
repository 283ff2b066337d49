"""A tiny model, random sequences, and reference implementations to compare with."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import re
import resource
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.builders import components
from jaxrl.builders.method import build_method
from jaxrl.builders.resolved import resolve_names
from jaxrl.config.keys import ExtraKeys
from jaxrl.config.schema import EXTRA_KEYS, KEYS, default_config
from jaxrl.extras.experts.qwen_moe import QwenMoeConfig
from jaxrl.models import kv_cache
from jaxrl.models.attention.kernels import compute_key_ranges
from jaxrl.models.attention.reference import XLA, attend_pages
from jaxrl.models.aux_arrays import AuxArrays
from jaxrl.models.layers import LayerScan, SamplerLayerScan, prepare_sampler_weights
from jaxrl.models.output import LOGIT_CAPACITIES
from jaxrl.models.qwen import QwenConfig
from jaxrl.models.recurrence import make_recurrence
from jaxrl.objectives.aggregation import AGGREGATIONS, token_weights
from jaxrl.runtime.sharding import count_batch_shards
from jaxrl.training.estimators import AdvantageEstimator
from jaxrl.training.packing import PackedBatch, compute_logit_capacities, pack_sequences
from jaxrl.training.policy_loss import make_policy_loss
from jaxrl.training.update import GradientStep

ROOT = Path(__file__).parents[1]


def build(config, *arguments, **options):
    """Build the components of a configuration, validated or not."""
    return components.build(resolve_names(config), *arguments, **options)


def settings_of(config):
    """Return the run settings of a configuration, without task sources."""
    return components.build_run_settings(resolved(config))


def resolved(config):
    """Return a configuration with its names resolved, without task sources."""
    return resolve_names(config, needs_data=False)


def method_of(config):
    """Return the method of a configuration."""
    return build_method(resolved(config))


BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# 127 is prime and divides no other dimension. So an array has a vocabulary axis exactly if 127
# divides its size, even if the vocabulary is split in two or merged with other axes.
TINY = QwenConfig(
    vocab_size=254,
    width=64,
    mlp_width=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope_theta=10_000.0,
    rms_norm_eps=1e-6,
    tie_embeddings=False,
    qkv_bias=True,
    output_bias=False,
    qk_norm=True,
    max_positions=512,
)
# A dense layer between two layers with experts.
TINY_MOE = QwenMoeConfig(
    **{**vars(TINY), "num_layers": 3, "qkv_bias": False},
    expert_width=26,
    num_experts=8,
    top_k=2,
    renormalize=True,
    expert_layers=(0, 2),
)
UPDATE_PROGRAMS = 2 + 2 * len(LOGIT_CAPACITIES)
"""Most programs of an update of one size: start, optimizer, and two per logit capacity."""

NUM_TOKENS = 250  # real tokens; the last four ids pad the vocabulary


def with_devices(count):
    """Return the environment that gives another process `count` virtual devices."""
    flags = os.environ.get("XLA_FLAGS", "")
    return {"XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={count}"}


def tiny_params(config=TINY, seed=0):
    """Return numpy parameters with distributions far from uniform, without compiling anything."""
    rng = np.random.default_rng(seed)

    def rough(path, leaf):
        name = jax.tree_util.keystr(path)
        noise = rng.standard_normal(leaf.shape, np.float32)
        if "bias" in name or "scale" in name:
            return 0.1 * noise + np.float32("scale" in name)
        is_table = "lm_head" in name or "embed" in name
        fan_in = leaf.shape[-1 if "embed" in name else -2]
        return noise * np.float32((2 if is_table else 1) / fan_in**0.5)

    return jax.tree_util.tree_map_with_path(rough, config.make_abstract_params())


@dataclass(frozen=True)
class Sequence:
    """A trajectory with the fields that packing and losses need."""

    token_ids: np.ndarray
    loss_mask: np.ndarray
    rollout_logprobs: np.ndarray
    advantage: float = 1.0
    old_logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None
    token_arrays: dict = field(default_factory=dict)
    contexts: tuple = ()
    attachments: tuple = ()


def random_sequences(lengths, *, seed=0, num_tokens=NUM_TOKENS):
    """Return sequences of a prompt, then alternating sampled tokens and observations."""
    rng = np.random.default_rng(seed)
    sequences = []
    for length in lengths:
        mask = np.arange(length) % 7 > 1
        mask[: max(length // 4, 1)] = False
        noise = rng.standard_normal((3, length)).astype(np.float32)
        sequences.append(
            Sequence(
                token_ids=rng.integers(0, num_tokens, length).astype(np.int32),
                loss_mask=mask,
                rollout_logprobs=np.where(mask, noise[0] - 5, 0).astype(np.float32),
                advantage=float(rng.standard_normal()),
                old_logprobs=noise[1] - 5,
                ref_logprobs=noise[2] - 5,
            )
        )
    return sequences


def sharing_prompts(sequences, prompt_lengths):
    """Regroup sequences equally, each group with a shared prompt of the given length.

    A sequence not longer than its prompt has no token with loss.
    """
    size = len(sequences) // len(prompt_lengths)
    out = []
    for index, sequence in enumerate(sequences):
        length = prompt_lengths[index // size]
        token_ids, mask = sequence.token_ids.copy(), sequence.loss_mask.copy()
        prompt = sequences[index - index % size].token_ids[:length]
        token_ids[: len(prompt)] = prompt[: len(token_ids)]
        mask[:length], mask[length : length + 1] = False, True
        logprobs = np.where(mask, sequence.rollout_logprobs, 0)
        out.append(
            replace(sequence, token_ids=token_ids, loss_mask=mask, rollout_logprobs=logprobs)
        )
    return out


def compute_loss_weights(sequences, aggregation, scale=None):
    """Return the token weights of sequences that form a complete mini-batch."""
    function = AGGREGATIONS[aggregation]
    if "max_response_tokens" in inspect.signature(function).parameters:
        function = partial(function, max_response_tokens=scale)
    return token_weights([sequence.loss_mask for sequence in sequences], function)


def weights_in_rows(mask, ids, aggregation, scale=None):
    """Return the token weights of packed rows, with trajectories identified by ids above 0."""
    names = np.unique(ids[ids > 0])
    each = [
        Sequence(token_ids=None, loss_mask=mask[ids == n], rollout_logprobs=None) for n in names
    ]
    out = np.zeros(mask.shape, np.float32)
    for name, weights in zip(names, compute_loss_weights(each, aggregation, scale), strict=True):
        out[ids == name] = weights
    return out


def pack_all(sequences, shape, *, aggregation="token-mean", scale=None, counted=None, num_shards=1):
    """Pack sequences with their weights and their old and reference logprobs.

    `scale` is the `max_response_tokens` of the aggregation, if it takes one. `counted` is the
    complete mini-batch, which includes `sequences`, and by default is the same.
    """
    advantages = np.array([sequence.advantage for sequence in sequences], np.float32)
    counted = sequences if counted is None else counted
    weights = dict(
        zip(map(id, counted), compute_loss_weights(counted, aggregation, scale), strict=True)
    )
    fields = {"token_weights": [weights[id(sequence)] for sequence in sequences]}
    for name in ("old_logprobs", "ref_logprobs"):
        values = [getattr(sequence, name) for sequence in sequences]
        if all(value is not None for value in values):
            fields[name] = values
    return pack_sequences(sequences, advantages, shape, token_fields=fields, num_shards=num_shards)


def scatter(batch, values):
    """Place one array per sequence into `[A, b, T]`, in the positions chosen by packing."""
    out = np.zeros(batch.token_ids.shape, np.float32)
    for index, value in enumerate(values):
        positions = batch.segment_ids == index + 1
        out[positions] = value[len(value) - positions.sum() :]
    return out


def gather(batch, values, index):
    """Return the values, from `[A, b, T]`, of the tokens of sequence `index`, in order."""
    return np.asarray(values)[np.asarray(batch.segment_ids) == index + 1]


def full_pass(
    config, params, token_ids, positions, segment_ids, *, remat="none", scan=True, aux=None
):
    """Return the final hidden states of packed rows, with XLA's attention."""
    attend = XLA.make_attend(segment_ids, positions)
    run_recurrence = make_recurrence(
        config.state_specs, compute_key_ranges(segment_ids, positions)[:, 0]
    )
    layer_scan = LayerScan(
        remat=remat, scan=scan, aux=aux or AuxArrays(), run_recurrence=run_recurrence
    )
    return config.compute_hidden_states(params, token_ids, positions, attend, layer_scan)


def read_tokens(config, weights, cache, tables, start, counts, token_ids):
    """Append C tokens to each row as the sampler does.

    Of the tokens `[B, C]`, the first `counts` `[B]` are valid; `start` `[B]` are cached, in the
    blocks of `tables` `[B, M]`. `weights` are the result of `prepare_decoding_weights`.

    Returns:
        Hidden states `[B, C, D]` and the cache with these tokens.
    """
    B, C = token_ids.shape
    positions = start[:, None] + jnp.arange(C)
    limits = jnp.where(jnp.arange(C) < counts[:, None], positions + 1, 0)

    def attend(_, pages, past, q, k, v):
        q, k, v = (x.reshape(B, C, *x.shape[1:]) for x in (q, k, v))
        written = tuple(
            kv_cache.write_tokens(before, tables, start, counts, new.swapaxes(1, 2))
            for before, new in zip(pages, (k, v), strict=True)
        )
        out, _ = attend_pages(q, *written, tables, limits)
        return out.astype(q.dtype).reshape(B * C, *q.shape[2:]), written

    layer_scan = SamplerLayerScan(attend, cache)
    weights = prepare_sampler_weights(weights, scan=False, stacks=config.partial_layer_indices)
    hidden = config.compute_sampler_hidden_states(
        weights, token_ids.reshape(-1), positions.reshape(-1), layer_scan
    )
    return hidden.reshape(B, C, -1), layer_scan.cache


def dense_table(params, config, token_ids, *, num_tokens=NUM_TOKENS, temperature=1.0):
    """Return all log-probabilities of one sequence `[L, V]`; row t predicts token t + 1."""
    token_ids = jnp.asarray(token_ids)
    positions = jnp.arange(len(token_ids))
    row = (token_ids[None], positions[None], jnp.ones((1, len(token_ids)), jnp.int32))
    hidden = full_pass(config, params, *row)[0]
    head = params["embed"]["embedding"].T if config.tie_embeddings else params["lm_head"]["kernel"]
    return jax.nn.log_softmax((hidden @ head)[:, :num_tokens] / temperature)


def dense_logprobs(params, config, token_ids, **settings):
    """Return dense logprobs and entropies `[L]` of one sequence; 0 for its first token."""
    table = dense_table(params, config, token_ids, **settings)[:-1]
    logprobs = table[jnp.arange(len(table)), jnp.asarray(token_ids)[1:]]
    entropies = -(jnp.exp(table) * table).sum(axis=-1)
    return jnp.pad(logprobs, (1, 0)), jnp.pad(entropies, (1, 0))


def settings(**changes):
    """Return the default configuration with changed keys."""
    config = default_config()
    config.update_from_flattened_dict(changes)
    return config


def method_with(**changes):
    """Return the method of the default configuration with changed keys."""
    return method_of(settings(**changes))


def estimator(**changes):
    """Return the advantage estimator of the default configuration with changed keys."""
    method = method_with(**changes)
    return AdvantageEstimator(method.advantage, method.seed)


def gradient_of(model, token_loss, *, temperature=1.0, entropy_gradient=False):
    """Return `gradient(params, batch, num_micro) -> (gradients, metrics)` of all micro-batches."""
    gradient = GradientStep(
        model, token_loss, temperature=temperature, entropy_gradient=entropy_gradient
    )
    begin = jax.jit(gradient.init_sums.function)
    add = jax.jit(gradient.loop.program.function, static_argnums=5)

    def compute(params, batch, num_micro):
        sizes = {
            "num_tokens": 0,
            "num_shared": 0,
            "num_loss_tokens": 0,
            "padding": 0.0,
            "imbalance": 0.0,
        }
        packed = PackedBatch(batch=batch, num_micro=num_micro, **sizes)
        sums = begin(params, batch)
        num_shards = count_batch_shards(model.mesh)
        capacities = compute_logit_capacities(packed, num_shards, model.num_pieces)
        for index, capacity in enumerate(capacities):
            sums = add(params, sums, batch, index, index + 1, capacity)
        return sums.gradients, sums.finish_metrics(model.architecture.statistics_reader)

    return compute


def policy_loss(*, loss=None, kl=None):
    """Return the loss of the train stage with changed settings."""
    config = default_config()
    config.loss.update(loss or {})
    config.kl.update(kl or {})
    return make_policy_loss(method_of(config))


def split_fused(gradients, config):
    """Split the gradients of fused tensors into parts named as in `get_hf_names`."""
    split = dict(gradients)
    for name, fused in config.get_hf_fused_tensors().items():
        whole = split.pop(name)
        split |= {part: whole[index, rows] for part, (index, rows) in fused.slices.items()}
    return split


def fuse_tensors(tensors, config):
    """Return the tensors as transformers 5 stores them; the inverse of `split_fused`."""
    fused = dict(tensors)
    for name, whole in config.get_hf_fused_tensors().items():
        array = np.empty(whole.shape, np.float32)
        for part, (index, rows) in whole.slices.items():
            array[index, rows] = fused.pop(part)
        fused[name] = array
    return fused


def relative_distance(got, wanted):
    """Return the norm of the difference of two trees over the norm of the second."""
    got, wanted = (
        np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])
        for tree in (got, wanted)
    )
    return np.linalg.norm(got - wanted) / np.linalg.norm(wanted)


@contextmanager
def compilations():
    """Collect an entry for every program that XLA compiles in the block, retraced or not."""
    seen = []

    def listen(event, duration_s, **_):
        if event.endswith("backend_compile_duration"):
            seen.append(duration_s)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def program_text(function, *args):
    """Return XLA's text of the program that a `CompiledFunction` runs for these arguments.

    Compiles nothing after a call with the same shapes.
    """
    return function._jitted.lower(*args).compile().as_text()


def shapes_in(text):
    """Return all array shapes in a program's text."""
    shapes = re.findall(r"\b(?:pred|bf16|[fsu]\d+)\[([\d,]*)\]", text)
    return {tuple(int(size) for size in sizes.split(",") if size) for sizes in shapes}


@contextmanager
def no_file_beyond(size):
    """Simulate a full disk: limit the size of files to `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def as_nobody():
    """Drop root privileges, so that file permissions apply; files must be readable by everyone."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@contextmanager
def without_keys_of(folder):
    """Remove the keys of `jaxrl/extras/<folder>`, then restore all keys in order."""
    keys, extra_keys = dict(KEYS), EXTRA_KEYS[folder]
    for key in extra_keys.keys:
        del KEYS[key]
    EXTRA_KEYS[folder] = ExtraKeys()
    try:
        yield
    finally:
        EXTRA_KEYS[folder] = extra_keys
        KEYS.clear()
        KEYS.update(keys)


def text(page):
    """Return the text of a document."""
    return page.read_text(encoding="utf-8")


def blocks(page, language):
    """Return the code blocks of a document in a language."""
    return [code for name, code in BLOCK.findall(text(page)) if name == language]


def shown_config(page):
    """Execute a document's configuration; return its namespace, with the text as `code`."""
    [code] = [code for code in blocks(page, "python") if "def get_config" in code]
    names = {"code": code}
    exec(code, names)
    return SimpleNamespace(**names)


def readme_config():
    """Return the configuration that README shows."""
    return shown_config(ROOT / "README.md").get_config()


def per_token_of(policy_loss):
    """Return a function that returns only the per-token values of a policy loss."""
    return lambda *arrays, **settings: policy_loss(*arrays, **settings).per_token


def cancelled(coroutine, turns, times):
    """Cancel a coroutine after some turns of its event loop; return True if it ended cancelled."""

    async def run():
        task = asyncio.ensure_future(coroutine)
        for _ in range(turns):
            await asyncio.sleep(0)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        await asyncio.wait([task], timeout=20)
        return task.cancelled()

    return asyncio.run(run())


def processes_with(text):
    """Return the ids of the processes with a text in their environment."""
    pids = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # the process has ended
            if str(text).encode() in environment.read_bytes():
                pids.append(int(environment.parent.name))
    return pids

"""Checks of sampler and update on meshes of virtual devices, for `test_sharding.py`.

python -m tests.mesh_worker CHECK
"""

import itertools
import math
import re
import sys
from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl.extras.experts.routing import ROUTED_EXPERTS
from jaxrl.extras.kernels import attention_gpu as gpu
from jaxrl.extras.lora.adapter import Adapter, find_targets
from jaxrl.models.attention import reference
from jaxrl.models.attention.choice import select_kernels, shard_attention
from jaxrl.models.attention.kernels import compute_key_ranges
from jaxrl.models.attention.reference import XLA
from jaxrl.models.aux_arrays import AuxArrays
from jaxrl.models.layers import LayerScan
from jaxrl.models.policy import Model
from jaxrl.runtime import sharding
from jaxrl.runtime.sharding import count_batch_shards, make_mesh, make_param_shardings
from jaxrl.sampling import next_token
from jaxrl.sampling.decode import CacheIndices
from jaxrl.sampling.engine import PAGES_PER_TRANSFER, Engine, Request
from jaxrl.sampling.sample_keys import derive_sample_keys
from jaxrl.sampling.stop_strings import StopAutomaton
from jaxrl.sampling.weights import WeightConverter
from jaxrl.training.packing import BatchShape, compute_logit_capacities
from jaxrl.training.update import (
    GradientStep,
    ScoreStep,
    UpdateStep,
    init_state,
    shard_batch,
)
from tests.helpers import (
    NUM_TOKENS,
    TINY,
    TINY_MOE,
    UPDATE_PROGRAMS,
    Sequence,
    compilations,
    dense_table,
    gather,
    pack_all,
    policy_loss,
    program_text,
    random_sequences,
    relative_distance,
    shapes_in,
    tiny_params,
)
from tests.models.attention.brute import random_inputs, random_rows
from tests.training.seen import ADVANTAGES, naive, packed_in, sequences, weighted
from tests.vision import golden

AXES = ("data", "fsdp", "context", "expert", "tensor")
TABLE = (TINY.vocab_size, TINY.width)
NUM_ROWS = 16
GROUP_SIZE = 4
BUDGET = 8  # tokens per turn
CHUNK_TOKENS = 16
# 11 divides no dimension except the length of a row: an array holds activations of tokens exactly
# if 11 divides its number of elements.
SHAPE = BatchShape(num_micro=3, micro_rows=8, row_tokens=44)
LENGTHS = [13, 44, 24, 24, 7, 40] * 3
COLLECTIVE = re.compile(
    r"= (\(.*?\)|\S+) (all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute"
    r"|collective-broadcast)(?:-start)?\("
)
ARRAY = re.compile(r"\w+\[([\d,]*)\]")


def complete(**sizes):
    return dict.fromkeys(AXES, 1) | sizes


def mesh_of(sizes):
    return make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])


def count_shards(sizes):
    return sizes["data"] * sizes["fsdp"] * sizes["context"]


def split_axes(spec, size):
    """Return the axes of each of the first `size` dimensions of a sharding spec, as tuples."""
    dimensions = [*spec, *[None] * size][:size]
    return [axes if isinstance(axes, tuple) else (axes,) if axes else () for axes in dimensions]


def check_below(bound, **gaps):
    for name, gap in gaps.items():
        assert gap < bound, f"{name} is {gap}; expected less than {bound}"


def check_equal(got, wanted):
    assert got == wanted, f"got {got}; expected {wanted}"


def find_collectives(text):
    """Return operation and number of elements of everything that moves between devices."""
    moved = []
    for arrays, operation in COLLECTIVE.findall(text):
        for sizes in ARRAY.findall(arrays):
            size = math.prod(int(size) for size in sizes.split(",") if size)
            moved.append((operation, size))
    return moved


def moved_activations(text):
    return [size for _, size in find_collectives(text) if size % 11 == 0]


def expected_activations(sizes, config, own_tokens):
    """Return how often activations of each size move between devices in an update."""
    context, tensor, counts = sizes["context"], sizes["tensor"], Counter()
    if tensor > 1:  # sums over heads and the MLP: 3 forward, 1 recomputed, 5 of gradients
        counts[own_tokens * config.width] += 9
    if context > 1:
        heads = config.num_kv_heads // tensor * config.head_dim
        counts[own_tokens * context] += 2  # segment ids and positions of whole rows
        counts[own_tokens * heads * context] += 4  # keys and values, forward and backward
        counts[own_tokens * heads] += 2  # gradients of the device's own keys and values
    if sizes["data"] == 1:  # the embedding's gradient is summed in parts of the width
        parts = sizes["fsdp"] * context
        counts[own_tokens * config.width // parts] += parts
        counts[own_tokens * parts // tensor] += 1  # ids, of tokens split over `tensor`
        counts[own_tokens] += tensor > 1
    return +counts


def make_requests():
    """Return four samples each of six prompts, whose keys depend on no row or mesh."""
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, NUM_TOKENS, rng.integers(4, 16)).tolist()) for _ in range(6)]
    number = np.arange(len(prompts) * GROUP_SIZE)
    group, sample = number // GROUP_SIZE, number % GROUP_SIZE
    keys = derive_sample_keys(0, 1, 0, group, sample, np.zeros_like(number))
    return [
        Request(prompt_ids=prompts[g], sample_key=key, budget=BUDGET)
        for g, key in zip(group, keys, strict=True)
    ]


def start_engine(mesh, config, params):
    """Build and compile an engine, and submit the requests."""
    automaton = StopAutomaton([bytes([i]) for i in range(NUM_TOKENS)], [*"ABCDEFGH"])
    engine = Engine(
        config,
        mesh,
        automaton,
        num_tokens=NUM_TOKENS,
        eos_ids=[3],
        num_rows=NUM_ROWS,
        max_total_tokens=64,
        chunk_tokens=4,
        records=bool(config.recorded_specs),
    )
    engine.row_sizes = engine.row_sizes[-1:]  # each size compiles for seconds
    engine.compile()
    engine.set_weights(params)
    engine.submit(make_requests())
    return engine


def sample(engine):
    """Sample two turns of every request, with an observation between; return the sequences."""
    requests = make_requests()
    rows = [{"ids": list(r.prompt_ids), "logprobs": [0.0] * len(r.prompt_ids)} for r in requests]
    for row in rows:
        row["mask"], row["experts"], row["turns"] = [False] * len(row["ids"]), [], 0
    while not engine.is_idle:
        resumed = []
        for event in engine.step(ahead=1):
            row = rows[event.request]
            row["ids"] += event.token_ids.tolist()
            row["logprobs"] += event.logprobs.tolist()
            row["mask"] += [True] * len(event.token_ids)
            row["experts"].append(event.recorded.get(ROUTED_EXPERTS))
            if event.status == 0:
                continue
            row["turns"] += 1
            if row["turns"] == 2:
                engine.finish(event.request)
                continue
            observation = list(range(5, 10 + event.request % 5))
            row["ids"] += observation
            row["logprobs"] += [0.0] * len(observation)
            row["mask"] += [False] * len(observation)
            resumed.append((event.request, observation, BUDGET))
        engine.resume(resumed)
    for row in rows:
        has_experts = row["experts"][0] is not None
        row["arrays"] = {ROUTED_EXPERTS: np.concatenate(row["experts"])} if has_experts else {}
    return [
        Sequence(
            token_ids=np.array(row["ids"], np.int32),
            loss_mask=np.array(row["mask"]),
            rollout_logprobs=np.array(row["logprobs"], np.float32),
            token_arrays=row["arrays"],
        )
        for row in rows
    ]


def check_sampled_logprobs(score, params, mesh, samples, bound):
    """Check the logprobs of sampled sequences against the training pass of one device."""
    shape = BatchShape(num_micro=3, micro_rows=8, row_tokens=64)
    packed = pack_all([replace(sequence, token_arrays={}) for sequence in samples], shape)
    scored = score(params, shard_batch(mesh, packed.batch), packed)
    gaps = [
        np.abs(gather(packed.batch, scored, i) - sequence.rollout_logprobs)[sequence.loss_mask]
        for i, sequence in enumerate(samples)
    ]
    check_below(bound, logprob_gap=np.concatenate(gaps).max())
    assert sum(sequence.loss_mask.sum() for sequence in samples) > 200


def check_draws(params, samples):
    """Check that every uniform lies within its token's interval as one device computes it."""
    token_ids = np.zeros((len(samples), 64), np.int32)
    for row, sequence in zip(token_ids, samples, strict=True):
        row[: len(sequence.token_ids)] = sequence.token_ids
    tables = jax.jit(jax.vmap(lambda ids: dense_table(params, TINY, ids)))(token_ids)
    probabilities = np.exp(np.asarray(tables, np.float64))
    for index, (sequence, request) in enumerate(zip(samples, make_requests(), strict=True)):
        places = np.flatnonzero(sequence.loss_mask)
        keys = np.broadcast_to(request.sample_key, (64, 2))
        uniforms = np.asarray(next_token.sample_uniforms(keys, jnp.arange(64)), np.float64)[places]
        drawn = probabilities[index, places - 1]
        sampled = (np.arange(len(places)), token_ids[index, places])
        end = np.cumsum(drawn, axis=-1)[sampled]
        check_below(1e-5, beyond_end=(uniforms - end).max())
        check_below(1e-5, before_start=(end - drawn[sampled] - uniforms).max())


def check_cache_layout(engine, sizes):
    """Check that the cache is split by pages and heads."""
    leaves = jax.tree.leaves(engine._cache)
    layout = leaves[0].sharding
    assert all(leaf.sharding == layout for leaf in leaves)
    pages, heads = split_axes(layout.spec, 2)
    check_equal(pages, tuple(axis for axis in sharding.PIECE_AXES if sizes[axis] > 1))
    check_equal(heads, ("tensor",) if sizes["tensor"] > 1 else ())
    shards = [shard for leaf in leaves for shard in leaf.addressable_shards]
    shape = (NUM_ROWS // count_shards(sizes) * 4, 2 // sizes["tensor"], 16, 16)
    check_equal({shard.data.shape for shard in shards}, {shape})
    check_equal(len({str(shard.index) for shard in shards}), 8)


def find_sampler_collectives(engine):
    """Return what the programs that use the cache move between devices."""
    num_rows = engine.row_sizes[-1]
    chunk, _ = engine._build_rows([[] for _ in range(engine.num_shards)], num_rows)
    blocks, _ = engine._prefill_batcher.make_blocks(
        (), 4 * engine.programs.block_tokens, engine._tables
    )
    pages = np.zeros(engine.num_shards * PAGES_PER_TRANSFER, np.int32)
    scalar = np.float32(1)
    arguments = {
        "prefill": (engine._weights, engine._cache, blocks, engine._attachment_embeds),
        "decode": (
            *(engine._weights, engine._cache, engine._state, chunk, engine._stops),
            *(scalar, scalar, next_token.FULL),
        ),
        "copy": (engine._cache, CacheIndices(pages), CacheIndices(pages)),
    }
    return {
        function.name: find_collectives(program_text(function, *arguments[function.name]))
        for function in engine.jitted_functions
        if function.name in arguments
    }


def check_sampler_moves_no_cache(engine, sizes):
    # The smallest piece of the cache: keys of one page, one layer and the heads of one device.
    smallest = 2 // sizes["tensor"] * 16 * 16
    moved = find_sampler_collectives(engine)
    check_equal(moved["copy"], [])
    operations = {operation for operation, _ in moved["decode"]}
    assert operations <= {"all-gather", "all-reduce", "collective-permute"}, operations
    activations = NUM_ROWS // count_shards(sizes) * TINY.width
    assert all(size < smallest or size <= activations for _, size in moved["decode"])
    if sizes["tensor"] == 1:
        check_equal(moved["decode"], [])  # every row stays on its device
    # The activations of a prefill are summed over heads; nothing else is as large.
    activations = 64 * TINY.width
    for operation, size in moved["prefill"]:
        assert size < smallest or (operation == "all-reduce" and size <= activations)


def build_model(mesh, config=TINY, **settings):
    settings["attention"] = select_kernels("xla", mesh, config)
    return Model(config.with_kernels(mesh, experts="auto"), mesh, num_tokens=NUM_TOKENS, **settings)


def with_random_experts(sequences):
    """Record experts of every second token, as if sampled with other weights."""
    rng, size = np.random.default_rng(5), (len(TINY_MOE.expert_layers), TINY_MOE.num_experts)
    recorded = []
    for sequence in sequences:
        scores = rng.random((len(sequence.token_ids), *size))
        experts = scores.argsort(axis=-1)[..., : TINY_MOE.top_k].astype(np.uint8)
        experts[::2] = 255
        recorded.append(replace(sequence, token_arrays={ROUTED_EXPERTS: experts}))
    return recorded


def share_on_first_device(tree):
    """Return the fraction of the bytes of a tree that the first device holds."""
    leaves = jax.tree.leaves(tree)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    return held / sum(leaf.nbytes for leaf in leaves)


def train(mesh, params, config=TINY):
    """Score, then update three times.

    Returns:
        The result of the first update to compare between meshes, the program that adds gradients as
        text, and the state after the updates.
    """
    model = build_model(mesh, config, logits_chunk_tokens=CHUNK_TOKENS)
    optimizer = optax.adamw(1e-3)
    loss = policy_loss(
        loss={"entropy_coef": 0.01, "clip_high": 0.3}, kl={"coef": 0.1, "anchor": "ref"}
    )
    step = UpdateStep(model, loss, optimizer, entropy_gradient=True)
    score = ScoreStep(model, temperature=1.0)
    sequences, token_arrays = random_sequences(LENGTHS), {}
    if config.num_experts:
        sequences, token_arrays = with_random_experts(sequences), config.recorded_specs
    packed = pack_all(sequences, replace(SHAPE, token_arrays=token_arrays))
    batch = shard_batch(mesh, packed.batch)
    logprobs = score(params, batch, packed)
    copies = jax.device_put(jax.tree.map(np.array, params), make_param_shardings(mesh, config))
    state = init_state(copies, mesh, config, optimizer)  # donates the copies
    wanted = jax.tree.map(lambda leaf: leaf.sharding, state)
    with compilations() as compiled:
        state, metrics = step(state, batch, packed)
        # Adam's first moment starts at zero, so it now holds the gradient.
        mu = optax.tree_utils.tree_get(state.opt_state, "mu")
        gradient = jax.tree.map(lambda leaf: np.asarray(leaf) / 0.1, mu)
        for _ in range(2):
            state, _ = step(state, batch, packed)
    assert len(compiled) == step.num_programs <= UPDATE_PROGRAMS
    check_equal(int(state.num_updates), 3)
    jax.tree.map(
        lambda x, s: check_equal(x.sharding.is_equivalent_to(s, x.ndim), True), state, wanted
    )
    sums = step.gradient.init_sums(state.params, batch)
    capacity = compute_logit_capacities(packed, count_batch_shards(mesh), model.num_pieces)[0]
    text = program_text(
        step.gradient.loop.program, state.params, sums, batch, np.int32(0), np.int32(1), capacity
    )
    result = {
        "gradient": gradient,
        "logprobs": logprobs,
        "metrics": {name: float(metric.value) for name, metric in metrics.items()},
    }
    return result, text, state


def compare_results(got, wanted):
    check_below(
        1e-5, gradient_distance=float(relative_distance(got["gradient"], wanted["gradient"]))
    )
    gap = np.abs(np.asarray(got["logprobs"]) - np.asarray(wanted["logprobs"])).max()
    check_below(5e-5, scored_logprob_gap=gap)
    for name, value in wanted["metrics"].items():
        check_below(1e-4, **{name: abs(got["metrics"][name] - value)})
    assert 0 < got["metrics"]["actor/pg_clipfrac"] < 1


def check_split(sizes, result, state):
    """Check that scores are split like the batch, and weights and moments over their axes."""
    micro, row, token = split_axes(result["logprobs"].sharding.spec, 3)
    check_equal(micro, ())
    check_equal(row, tuple(axis for axis in sharding.BATCH_AXES if sizes[axis] > 1))
    check_equal(token, ("context",) if sizes["context"] > 1 else ())
    split = sizes["fsdp"] * sizes["context"] * sizes["tensor"]
    moments = [optax.tree_utils.tree_get(state.opt_state, name) for name in ("mu", "nu")]
    for tree in (state.params, moments):
        assert 1 / split <= share_on_first_device(tree) < 1.05 / split  # norms are replicated


def count_logits_tokens(text):
    """Return the tokens of the largest array of logits that one device holds.

    Its vocabulary is whole or halved. Arrays with the width of the model are weights.
    """
    shapes = [shape for shape in shapes_in(text) if math.prod(shape) % 127 == 0]
    vocab = [next(size for size in shape if size % 127 == 0) for shape in shapes]
    tokens = {math.prod(shape) // size for shape, size in zip(shapes, vocab, strict=True)}
    return max(tokens - {TINY.width // split for split in (1, 2, 4, 8)})


def check_update_moves_weights_not_activations(sizes, text):
    # Each device computes its own rows. Otherwise activations and logits would be summed over
    # devices all the time.
    most = CHUNK_TOKENS // count_shards(sizes)
    assert most / 2 < count_logits_tokens(text) <= most
    own_tokens = SHAPE.micro_rows // count_shards(sizes) * SHAPE.row_tokens
    check_equal(Counter(moved_activations(text)), expected_activations(sizes, TINY, own_tokens))


def check_embedding_gradient_is_split(text):
    """Check that with `fsdp` each device sums its part of the width for the tokens of all."""
    added = "\n".join(line for line in text.splitlines() if "/scatter-add" in line)
    shapes = [shape for shape in shapes_in(added) if shape and shape[0] == TINY.vocab_size]
    check_equal(shapes, [(TINY.vocab_size, TINY.width // 8)])
    # The output layer's gradient is the only whole table, of each device's own tokens.
    check_equal(find_collectives(text).count(("all-reduce", math.prod(TABLE))), 1)
    check_equal(set(moved_activations(text)), {44 * TINY.width // 8})


def adapt(mesh, params):
    """Return the gradient of an adapter; check the layout of its sampler's weights."""
    adapter = Adapter(model=TINY, rank=4, alpha=8.0, targets=find_targets(TINY, ["all-linear"]))
    settings = {"logits_chunk_tokens": CHUNK_TOKENS, "remat": "none"}
    settings["attention"] = select_kernels("xla", mesh, TINY)
    model = Model(adapter, mesh, num_tokens=NUM_TOKENS, **settings)
    trained, base = adapter.make_param_specs()
    model.base = jax.device_put(params, make_param_shardings(mesh, base))
    rng = np.random.default_rng(0)
    adapter_params = jax.tree.map(
        lambda leaf: 0.1 * rng.standard_normal(leaf.shape, np.float32),
        trained.make_abstract_params(),
    )
    adapter_params = jax.device_put(adapter_params, make_param_shardings(mesh, trained))
    packed = pack_all(random_sequences(LENGTHS), SHAPE)
    sums = GradientStep(model, policy_loss())(
        adapter_params, shard_batch(mesh, packed.batch), packed
    )
    prepare = partial(adapter.prepare_decoding_weights, dtype=jnp.float32)
    converter = WeightConverter(prepare, adapter, mesh=mesh, train_mesh=mesh, scan_layers=True)
    policy = model.merge(adapter_params)
    weights, wanted = converter.convert(policy), prepare(jax.device_get(policy))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(weights), jax.device_get(wanted))
    for leaf, layout in zip(
        jax.tree.leaves(weights), jax.tree.leaves(converter.shardings), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(layout, leaf.ndim)
    # If training splits no width, the sampler uses the same arrays.
    is_shared = (
        weights["blocks"]["mlp"]["up"]["kernel"] is model.base["blocks"]["mlp"]["up"]["kernel"]
    )
    check_equal(is_shared, mesh.shape["fsdp"] * mesh.shape["context"] == 1)
    converter.free()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(model.base))
    return jax.device_get(sums.gradients)


def check_sharded_kernel(mesh):
    """Check the gradients of a kernel on each device against XLA with all rows and heads."""
    rng = np.random.default_rng(0)
    segment_ids, positions, _ = random_rows(rng, 8, 44)
    key_ranges = compute_key_ranges(jnp.asarray(segment_ids), jnp.asarray(positions))
    q, k, v, gradient = (jnp.asarray(x) for x in random_inputs(rng, (8, 44, 4, 8), 2))
    gradient *= (segment_ids > 0)[:, :, None, None]

    def differentiate(attend):
        return jax.vjp(lambda *inputs: attend(*inputs, key_ranges), q, k, v)[1](gradient)

    on_pieces = shard_attention(partial(gpu.attend_packed, interpret=True), mesh)

    def kernel(*inputs):
        *inputs, key_ranges = inputs
        out = on_pieces(*(sharding.split_into_pieces(mesh, x) for x in inputs), key_ranges)
        columns = [
            sharding.merge_pieces(mesh, out[:, :, n, h], (8, 44))
            for n, h in itertools.product(range(4), range(8))
        ]
        return jnp.stack(columns, axis=2).reshape(8, 44, 4, 8)

    got = jax.jit(differentiate, static_argnums=0)(kernel)
    for x, y in zip(got, differentiate(reference.attend_packed), strict=True):
        check_below(1e-5, attention_gap=float(jnp.abs(x - y).max()))


def check_meshes(meshes):
    """Check sampler and update on meshes of eight devices against one device.

    Returns:
        The program that adds gradients on the last mesh, as text.
    """
    params, one_device = tiny_params(), mesh_of(complete())
    on_one = jax.device_put(params, make_param_shardings(one_device, TINY))
    one_samples = sample(start_engine(one_device, TINY, on_one))
    check_draws(on_one, one_samples)
    one_result, _, _ = train(one_device, on_one)
    one_adapter = adapt(one_device, params)
    score = ScoreStep(Model(TINY, one_device, XLA, num_tokens=NUM_TOKENS), temperature=1.0)
    for sizes in meshes:
        print(sizes, flush=True)
        mesh = mesh_of(sizes)
        params_on_mesh = jax.device_put(params, make_param_shardings(mesh, TINY))
        engine = start_engine(mesh, TINY, params_on_mesh)
        check_cache_layout(engine, sizes)
        with compilations() as compiled:
            samples = sample(engine)
        check_equal(compiled, [])
        num_programs = {
            function.name: function.num_programs for function in engine.jitted_functions
        }
        check_equal(num_programs, {"prefill": 1, "decode": 2, "copy": 1, "swap": 1, "embed": 0})
        check_cache_layout(engine, sizes)
        check_sampler_moves_no_cache(engine, sizes)
        # Samples may differ only where rounding decides a draw; after it the text differs.
        check_draws(on_one, samples)
        is_same = [
            np.array_equal(x.token_ids, y.token_ids)
            for x, y in zip(samples, one_samples, strict=True)
        ]
        assert is_same.count(False) <= 2
        check_sampled_logprobs(score, on_one, one_device, samples, 5e-5)

        result, text, state = train(mesh, params_on_mesh)
        compare_results(result, one_result)
        check_split(sizes, result, state)
        check_update_moves_weights_not_activations(sizes, text)
        gap = relative_distance(adapt(mesh, params), one_adapter)
        check_below(1e-5, adapter_gradient_distance=float(gap))
        check_sharded_kernel(mesh)
    return text


def check_rows():
    text = check_meshes([complete(data=2, fsdp=2, tensor=2), complete(fsdp=8)])
    check_embedding_gradient_is_split(text)


def check_context():
    check_meshes([complete(data=2, context=4), complete(fsdp=2, context=2, tensor=2)])


IMAGE_MESHES = [
    complete(data=data, fsdp=fsdp, context=context, tensor=tensor)
    for data, fsdp, context, tensor in itertools.product((1, 2, 4, 8), repeat=4)
    if data * fsdp * context * tensor == 8 and tensor <= 2
]
"""All meshes of eight devices without experts; the model has two heads to split."""


def check_images(meshes=IMAGE_MESHES):
    """Check the gradient of a vision model against that of each sequence alone.

    Every second mesh has two sequences per row, and one micro-batch instead of two.
    """
    config, params = golden()[:2]
    # Twice with other advantages, so that each device has rows.
    advantages = [scale * advantage for scale in (1, 0.3) for advantage in ADVANTAGES]
    wanted = jax.tree.map(lambda leaf: 1.3 * leaf, naive())
    for index, sizes in enumerate(meshes):
        print(sizes, flush=True)
        is_long = index % 2 == 1 or sizes["context"] == 8
        shape = BatchShape(
            num_micro=1 if is_long else 2,
            micro_rows=8,
            row_tokens=88 if is_long else 44,
            max_tokens=44,
            tower=config.tower,
            num_pieces=sizes["context"],
        )
        mesh = mesh_of(sizes)
        packed = packed_in(shape, sequences() * 2, advantages, num_shards=count_batch_shards(mesh))
        kernels = select_kernels("xla", mesh, config)
        model = Model(config, mesh, num_tokens=96, attention=kernels, remat="names")
        batch = shard_batch(mesh, packed.batch)
        params_on_mesh = jax.device_put(params, make_param_shardings(mesh, config))
        step = GradientStep(model, weighted)
        sums = step(params_on_mesh, batch, packed)
        check_below(
            1e-5,
            distance=float(relative_distance(sums.gradients, wanted)),
            tower_distance=float(relative_distance(sums.gradients["vision"], wanted["vision"])),
        )


def choose_experts(params, ids):
    """Return the experts of each token of one sequence, `[T, layers, k]`."""
    aux = AuxArrays(records=True)
    positions = jnp.arange(len(ids))[None]
    attend = XLA.make_attend(jnp.ones_like(positions), positions)
    layer_scan = LayerScan(aux=aux, scan=False)
    TINY_MOE.compute_hidden_states(params, ids[None], positions, attend, layer_scan)
    return aux.recorded[ROUTED_EXPERTS]


def check_recorded_experts(params, samples):
    """Check that the sampler records the experts that the training pass chooses."""
    choose = jax.jit(choose_experts)
    for sequence in samples:
        recorded = sequence.token_arrays[ROUTED_EXPERTS]
        check_equal(len(recorded), len(sequence.token_ids) - 1)
        ids = jnp.asarray(np.pad(sequence.token_ids, (0, 64 - len(sequence.token_ids))))
        np.testing.assert_array_equal(recorded, choose(params, ids)[: len(recorded)])


def check_experts():
    """Check a mixture of experts on meshes of eight devices against one device."""
    params, one_device = tiny_params(TINY_MOE), mesh_of(complete())
    on_one = jax.device_put(params, make_param_shardings(one_device, TINY_MOE))
    one_result, _, _ = train(one_device, on_one, TINY_MOE)
    score = ScoreStep(build_model(one_device, TINY_MOE), temperature=1.0)
    for sizes in (
        complete(expert=8),
        complete(context=2, expert=4),
        complete(fsdp=2, expert=2, tensor=2),
    ):
        print(sizes, flush=True)
        mesh = mesh_of(sizes)
        params_on_mesh = jax.device_put(params, make_param_shardings(mesh, TINY_MOE))
        samples = sample(start_engine(mesh, TINY_MOE, params_on_mesh))
        check_sampled_logprobs(score, on_one, one_device, samples, 1e-4)
        check_recorded_experts(on_one, samples)
        result, text, _ = train(mesh, params_on_mesh, TINY_MOE)
        compare_results(result, one_result)
        share = share_on_first_device(params_on_mesh["blocks"]["moe"]["gate"]["kernel"])
        check_equal(share, 1 / math.prod(sizes[axis] for axis in AXES[1:]))
        # No array of the update holds all tokens x experts x width.
        tokens = SHAPE.micro_rows * SHAPE.row_tokens // count_shards(sizes)
        largest = max(map(math.prod, shapes_in(text)))
        check_below(tokens * TINY_MOE.num_experts * TINY_MOE.width, largest_array=largest)


def check_gradient(sizes, config):
    """Check gradients and logprobs of a small mesh against one device."""
    shape = BatchShape(num_micro=3, micro_rows=4, row_tokens=88)
    packed = pack_all(random_sequences(LENGTHS), shape)
    results = []
    for mesh in (mesh_of(complete()), mesh_of(sizes)):
        model = build_model(mesh, config, remat="none")
        params = jax.device_put(tiny_params(config), make_param_shardings(mesh, config))
        batch = shard_batch(mesh, packed.batch)
        loss = policy_loss(loss={"entropy_coef": 0.01, "clip_high": 0.3})
        sums = GradientStep(model, loss, entropy_gradient=True)(params, batch, packed)
        logprobs = ScoreStep(model, temperature=1.0)(params, batch, packed)
        results.append(jax.device_get((sums.gradients, logprobs)))
    (wanted, wanted_logprobs), (gradient, logprobs) = results
    check_below(1e-5, gradient_distance=float(relative_distance(gradient, wanted)))
    check_below(5e-5, logprob_gap=float(np.abs(logprobs - wanted_logprobs).max()))


def compute_with_float32_head(config, sizes):
    """Return the sampler's table and logits, and the trainer's logprobs and gradients."""
    mesh, params = mesh_of(sizes), tiny_params(config)
    # Layers add nothing, since two devices round their sums in bfloat16 differently.
    for layer in (params["blocks"]["attention"]["o"], params["blocks"]["mlp"]["down"]):
        layer["kernel"] *= 0
    params = jax.device_put(params, make_param_shardings(mesh, config))
    prepare = partial(config.prepare_decoding_weights, dtype=jnp.bfloat16)
    converter = WeightConverter(prepare, config, mesh=mesh, train_mesh=mesh, scan_layers=True)
    weights = converter.convert(params)
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(5, TINY.width)), jnp.bfloat16)
    logits = jax.jit(partial(config.unembed, num_tokens=NUM_TOKENS))(weights, hidden)
    model = build_model(
        mesh, config, dtype=jnp.bfloat16, remat="none", logits_chunk_tokens=CHUNK_TOKENS
    )
    shape = BatchShape(num_micro=1, micro_rows=2, row_tokens=44)
    packed = pack_all(random_sequences([13, 44, 24]), shape)
    batch = shard_batch(mesh, packed.batch)
    logprobs = ScoreStep(model, temperature=1.0)(params, batch, packed)
    sums = GradientStep(model, policy_loss())(params, batch, packed)
    results = jax.device_get((logits[..., :NUM_TOKENS], logprobs, sums.gradients))
    return weights["lm_head"]["kernel"], *results


def check_float32_head():
    """Check a float32 output layer of a bfloat16 model on four devices against one."""
    for is_tied in (True, False):
        config = replace(TINY, tie_embeddings=is_tied).with_head_dtype("float32")
        _, logits, logprobs, gradients = compute_with_float32_head(config, complete())
        table, *got = compute_with_float32_head(config, complete(fsdp=2, tensor=2))
        check_equal(table.dtype, jnp.dtype("float32"))
        check_equal(table.sharding.shard_shape(table.shape), (64, 127))  # split by tensor alone
        check_below(2e-5, logits_gap=float(np.abs(got[0] - logits).max()))
        check_below(2e-5, logprob_gap=float(np.abs(got[1] - logprobs).max()))
        check_below(1e-5, gradient_distance=float(relative_distance(got[2], gradients)))


def check_four_devices():
    """Check on four devices a part of what the other checks do on eight."""
    moe = replace(TINY_MOE, num_layers=2, expert_layers=(1,))
    check_gradient(complete(context=2, expert=2), moe)
    check_images([complete(context=2)])
    check_float32_head()

    # One device trains and the others only sample.
    mesh = mesh_of(complete())
    params = jax.device_put(tiny_params(), make_param_shardings(mesh, TINY))
    rollout_mesh = sharding.make_local_mesh(mesh, rollout_devices=3)
    prepare = partial(TINY.prepare_decoding_weights, dtype=jnp.float32)
    weights = WeightConverter(
        prepare, TINY, mesh=rollout_mesh, train_mesh=mesh, scan_layers=True
    ).convert(params)
    got, wanted = jax.device_get((weights, prepare(params)))
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    check_equal({d.id for leaf in jax.tree.leaves(weights) for d in leaf.devices()}, {1, 2, 3})


CHECKS = {
    "rows": check_rows,
    "context": check_context,
    "images": check_images,
    "experts": check_experts,
    "four devices": check_four_devices,
}

if __name__ == "__main__":
    CHECKS[sys.argv[1]]()

"""Measures sampler and update on meshes of eight virtual devices, for `test_sharding.py`.

    python -m tests.mesh_worker REPORT GROUP

One process for all meshes of a group; it writes what it measured as JSON and judges nothing.
"""

import itertools
import json
import math
import re
import sys
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
from jaxrl.models.attention.kernels import find_reads
from jaxrl.models.attention.reference import XLA
from jaxrl.models.aux_arrays import AuxArrays
from jaxrl.models.layers import LayerScan
from jaxrl.models.policy import Model
from jaxrl.runtime.sharding import (
    local_mesh,
    make_mesh,
    merge_pieces,
    num_batch_shards,
    param_shardings,
    split_into_pieces,
)
from jaxrl.sampling import next_token
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
    put_batch,
    put_patches,
)
from tests.helpers import (
    NUM_TOKENS,
    TINY,
    TINY_MOE,
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

MESHES = {
    "fsdp 8": {"data": 1, "fsdp": 8, "tensor": 1},
    "data 2, fsdp 2, tensor 2": {"data": 2, "fsdp": 2, "tensor": 2},
}

CONTEXT_MESHES = {
    "data 2, context 4": {"data": 2, "fsdp": 1, "context": 4, "tensor": 1},
    "fsdp 2, context 2, tensor 2": {"data": 1, "fsdp": 2, "context": 2, "tensor": 2},
}
GROUPS = {"rows": MESHES, "context": CONTEXT_MESHES}
EVERY_CONTEXT = [
    {"data": data, "fsdp": fsdp, "context": context, "tensor": tensor}
    for data, fsdp, context, tensor in itertools.product((1, 2, 4), (1, 2, 4), (2, 4, 8), (1, 2))
    if data * fsdp * context * tensor == 8
]
EVERY_MESH = [
    {"data": data, "fsdp": 8 // tensor // data, "context": 1, "tensor": tensor}
    for data, tensor in itertools.product((1, 2, 4, 8), (1, 2))
    if data * tensor <= 8
] + EVERY_CONTEXT
EXPERT_MESHES = {
    "expert 8": {"data": 1, "fsdp": 1, "expert": 8, "tensor": 1},
    "context 2, expert 4": {"data": 1, "fsdp": 1, "context": 2, "expert": 4, "tensor": 1},
    "fsdp 2, expert 2, tensor 2": {"data": 1, "fsdp": 2, "expert": 2, "tensor": 2},
}
TWO_DEVICES = {
    "pieces of rows": {"data": 1, "fsdp": 1, "context": 2, "expert": 1, "tensor": 1},
    "half the experts": {"data": 1, "fsdp": 1, "context": 1, "expert": 2, "tensor": 1},
}
SHOWN = [
    {"data": 1, "fsdp": 8, "context": 1, "tensor": 1},
    {"data": 2, "fsdp": 1, "context": 4, "tensor": 1},
]
"""Of these, whose devices have a row's tokens each, what moves between devices is looked at."""
TABLE = (TINY.vocab_size, TINY.width)
NUM_ROWS = 16
GROUP_SIZE = 4
BUDGET = 8  # tokens a turn
CHUNK_TOKENS = 16
# 11 divides no dimension but the length of a row: an array holds tokens' activations exactly when
# 11 divides its number of elements.
SHAPE = BatchShape(num_micro=3, micro_rows=8, row_tokens=44)
COLLECTIVE = re.compile(
    r"= (\(.*?\)|\S+) (all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute"
    r"|collective-broadcast)(?:-start)?\("
)
ARRAY = re.compile(r"\w+\[([\d,]*)\]")


def collectives(text):
    """Operation and number of elements of all that a program moves between devices."""
    moved = []
    for arrays, operation in COLLECTIVE.findall(text):
        for sizes in ARRAY.findall(arrays):
            size = math.prod(int(size) for size in sizes.split(",") if size)
            moved.append([operation, size])
    return moved


def requests():
    """Six prompts of four samples each, on keys that know nothing of rows or meshes."""
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, NUM_TOKENS, rng.integers(4, 16)).tolist()) for _ in range(6)]
    number = np.arange(len(prompts) * GROUP_SIZE)
    group, sample = number // GROUP_SIZE, number % GROUP_SIZE
    keys = derive_sample_keys(0, 1, 0, group, sample, np.zeros_like(number))
    return [
        Request(prompt_ids=prompts[g], sample_key=key, budget=BUDGET)
        for g, key in zip(group, keys, strict=True)
    ]


def cache_layout(engine):
    """How the cache lies: the spec, and the shapes and number of different parts on devices."""
    leaves = jax.tree.leaves(engine._cache)
    sharding = leaves[0].sharding
    assert all(leaf.sharding == sharding for leaf in leaves)
    shards = [shard for leaf in leaves for shard in leaf.addressable_shards]
    return {
        "spec": list(sharding.spec),
        "shapes": sorted({shard.data.shape for shard in shards}),
        "num_parts": len({str(shard.index) for shard in shards}),
    }


def sample(mesh, params, config=TINY):
    """Two turns of every request, with an observation between, through the engine."""
    automaton = StopAutomaton([bytes([i]) for i in range(NUM_TOKENS)], [*"ABCDEFGH"])
    engine = Engine(
        config,
        mesh,
        automaton,
        num_tokens=NUM_TOKENS,
        eos_ids=[3],
        num_rows=NUM_ROWS,
        max_prompt_tokens=16,
        max_total_tokens=64,
        chunk_tokens=4,
        records=bool(config.recorded),
    )
    engine.row_sizes = engine.row_sizes[-1:]  # one size will do: a compilation is seconds
    engine.compile()
    engine.set_weights(params)
    todo = requests()
    rows = [{"token_ids": list(r.prompt_ids), "logprobs": [0.0] * len(r.prompt_ids)} for r in todo]
    for row in rows:
        row["mask"], row["experts"] = [False] * len(row["token_ids"]), []
    engine.submit(todo)
    before = cache_layout(engine)
    num_turns = [0] * len(todo)
    with compilations() as compiled:
        while not engine.is_idle:
            resumed = []
            for event in engine.step(ahead=1):
                row = rows[event.request]
                row["token_ids"] += event.token_ids.tolist()
                row["logprobs"] += event.logprobs.tolist()
                row["mask"] += [True] * len(event.token_ids)
                row["experts"].append(event.recorded.get(ROUTED_EXPERTS))
                if event.status == 0:
                    continue
                num_turns[event.request] += 1
                if num_turns[event.request] == 2:
                    engine.finish(event.request)
                    continue
                observation = list(range(5, 10 + event.request % 5))
                row["token_ids"] += observation
                row["logprobs"] += [0.0] * len(observation)
                row["mask"] += [False] * len(observation)
                resumed.append((event.request, observation, BUDGET))
            engine.resume(resumed)
    report = {
        "cache_before": before,
        "cache_after": cache_layout(engine),
        "num_programs": {function.name: function.num_programs for function in engine.functions},
        "num_compilations": len(compiled),
        "collectives": sampler_collectives(engine),
    }
    return rows, report


def sampler_collectives(engine):
    """What the programs that touch the cache move between devices."""
    num_rows = engine.row_sizes[-1]
    chunk, _ = engine._build_rows([[] for _ in range(engine.num_shards)], num_rows)
    blocks, _ = engine._prefill_batcher.make_blocks(
        (), 4 * engine.programs.block_tokens, engine._tables
    )
    places = np.zeros(engine.num_shards * PAGES_PER_TRANSFER, np.int32)
    one = np.float32(1)
    arguments = {
        "append": (engine._weights, engine._cache, blocks, engine._attachment_embeds),
        "decode": (
            *(engine._weights, engine._cache, engine._state, chunk, engine._stops),
            *(one, one, next_token.FULL),
        ),
        "copy": (engine._cache, places, places),
    }
    return {
        function.name: collectives(program_text(function, *arguments[function.name]))
        for function in engine.functions
        if function.name in arguments
    }


def as_sequences(rows):
    return [
        Sequence(
            token_ids=np.array(row["token_ids"], np.int32),
            loss_mask=np.array(row["mask"]),
            rollout_logprobs=np.array(row["logprobs"], np.float32),
        )
        for row in rows
    ]


def logits_tokens(text):
    """Tokens of the largest array of logits that one device holds, its vocabulary whole or halved.

    Arrays of the width are weights, and cannot be logits of so many tokens.
    """
    shapes = [shape for shape in shapes_in(text) if math.prod(shape) % 127 == 0]
    vocab = [next(size for size in shape if size % 127 == 0) for shape in shapes]
    tokens = {math.prod(shape) // size for shape, size in zip(shapes, vocab, strict=True)}
    return max(tokens - {TINY.width // split for split in (1, 2, 4, 8)})


def embedding_gradients(text):
    """Shapes of what the gradients of tokens' embeddings are added up in, on one device."""
    added = "\n".join(line for line in text.splitlines() if "/scatter-add" in line)
    return sorted(shape for shape in shapes_in(added) if shape and shape[0] == TINY.vocab_size)


def share_on_first_device(tree):
    """Of the bytes of a tree of arrays, how many the first device holds."""
    leaves = jax.tree.leaves(tree)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    return held / sum(leaf.nbytes for leaf in leaves)


def model_on(mesh, config=TINY, **settings):
    settings["attention"] = select_kernels("xla", mesh, config)
    return Model(config.with_kernels(mesh, experts="auto"), mesh, num_tokens=NUM_TOKENS, **settings)


def with_random_experts(sequences):
    """Experts of every second token, as if a sampler of other weights had recorded them."""
    rng, sizes = np.random.default_rng(5), (len(TINY_MOE.expert_layers), TINY_MOE.num_experts)
    found = []
    for sequence in sequences:
        scores = rng.random((len(sequence.token_ids), *sizes))
        experts = scores.argsort(axis=-1)[..., : TINY_MOE.top_k].astype(np.uint8)
        experts[::2] = 255
        found.append(replace(sequence, token_arrays={ROUTED_EXPERTS: experts}))
    return found


def num_misrecorded(params, rows):
    """Choices that the sampler tells and the training pass makes otherwise."""
    count = 0
    choose_all = jax.jit(chosen_experts)
    for row in rows:
        told = np.concatenate(row["experts"])
        ids = jnp.asarray(np.pad(row["token_ids"], (0, 64 - len(row["token_ids"]))))
        count += int((told != choose_all(params, ids)[: len(told)]).any(axis=-1).sum())
        assert len(told) == len(row["token_ids"]) - 1
    return count


def chosen_experts(params, ids):
    """The experts of each token of one sequence, `[T, layers, k]`."""
    aux = AuxArrays(records=True)
    positions = jnp.arange(len(ids))[None]
    attend = XLA.make_attend(jnp.ones_like(positions), positions)
    layer_scan = LayerScan(aux=aux, scan=False)
    TINY_MOE.hidden_states(params, ids[None], positions, attend, layer_scan)
    return aux.recorded[ROUTED_EXPERTS]


def train(mesh, params, config=TINY):
    """Scores and updates twice; the report and the first gradient."""
    model = model_on(mesh, config, logits_chunk_tokens=CHUNK_TOKENS)
    optimizer = optax.adamw(1e-3)
    loss = policy_loss(
        loss={"entropy_coef": 0.01, "clip_high": 0.3}, kl={"coef": 0.1, "anchor": "ref"}
    )
    step = UpdateStep(model, loss, optimizer, entropy_gradient=True)
    score = ScoreStep(model, temperature=1.0)
    sequences, replayed = random_sequences([13, 44, 24, 24, 7, 40] * 3), {}
    if config.num_experts:
        sequences, replayed = with_random_experts(sequences), config.recorded
    packed = pack_all(sequences, replace(SHAPE, token_arrays=replayed))
    batch = put_batch(mesh, packed.batch)
    logprobs = score(params, batch, packed)
    copies = jax.device_put(jax.tree.map(np.array, params), param_shardings(mesh, config))
    state = init_state(copies, mesh, config, optimizer)  # which donates them
    wanted = jax.tree.map(lambda leaf: leaf.sharding, state)
    with compilations() as compiled:
        state, metrics = step(state, batch, packed)
        # Adam's first moment starts at zero, so it now holds the gradient itself.
        mu = optax.tree_utils.tree_get(state.opt_state, "mu")
        gradient = jax.tree.map(lambda leaf: np.asarray(leaf) / 0.1, mu)
        for _ in range(2):
            state, _ = step(state, batch, packed)
    sums = step.gradient.init_sums(state.params, batch)
    room = compute_logit_capacities(packed, num_batch_shards(mesh), model.num_pieces)[0]
    text = program_text(
        step.gradient.add.program, state.params, sums, batch, np.int32(0), np.int32(1), room
    )
    kept = jax.tree.map(lambda leaf, s: leaf.sharding.is_equivalent_to(s, leaf.ndim), state, wanted)
    report = {
        "logprobs_spec": list(logprobs.sharding.spec),
        "params_share": share_on_first_device(state.params),
        "moments_share": share_on_first_device(
            [optax.tree_utils.tree_get(state.opt_state, name) for name in ("mu", "nu")]
        ),
        "shardings_kept": all(jax.tree.leaves(kept)),
        "logits_tokens": logits_tokens(text),
        "activations_moved": [size for _, size in collectives(text) if size % 11 == 0],
        "largest_array": max(map(math.prod, shapes_in(text))),
        "embedding_gradients": embedding_gradients(text),
        "tables_summed": collectives(text).count(["all-reduce", math.prod(TABLE)]),
        "num_programs": step.num_programs,
        "num_compilations": len(compiled),
        "num_updates": int(state.num_updates),
        "metrics": {name: float(metric.value) for name, metric in metrics.items()},
    }
    return report, gradient, np.asarray(logprobs)


def adapt(mesh, params):
    """The gradient of an adapter, and how its sampler's weights lie on a mesh."""
    adapter = Adapter(model=TINY, rank=4, alpha=8.0, targets=find_targets(TINY, ["all-linear"]))
    settings = {"logits_chunk_tokens": CHUNK_TOKENS, "remat": "none"}
    settings["attention"] = select_kernels("xla", mesh, TINY)
    model = Model(adapter, mesh, num_tokens=NUM_TOKENS, **settings)
    model.base = jax.device_put(params, param_shardings(mesh, adapter.param_specs()[1]))
    rng = np.random.default_rng(0)
    own = jax.tree.map(
        lambda leaf: 0.1 * rng.standard_normal(leaf.shape, np.float32),
        adapter.param_specs()[0].abstract_params(),
    )
    own = jax.device_put(own, param_shardings(mesh, adapter.param_specs()[0]))
    packed = pack_all(random_sequences([13, 44, 24, 24, 7, 40] * 3), SHAPE)
    sums = GradientStep(model, policy_loss())(own, put_batch(mesh, packed.batch), packed)
    prepare = partial(adapter.weights_for_decoding, dtype=jnp.float32)
    weights = WeightConverter(prepare, adapter, mesh=mesh, train_mesh=mesh, scan_layers=True)
    policy = model.merge(own)
    made, wanted = weights.convert(policy), prepare(jax.device_get(policy))
    gaps = jax.tree.map(lambda a, b: float(jnp.abs(jax.device_get(a) - b).max()), made, wanted)
    lie = jax.tree.map(lambda a, s: a.sharding.is_equivalent_to(s, a.ndim), made, weights.shardings)
    kernel = made["blocks"]["mlp"]["up"]["kernel"]
    report = {
        "weights_gap": max(jax.tree.leaves(gaps)),
        "weights_lie": all(jax.tree.leaves(lie)),
        "kernel_is_shared": kernel is model.base["blocks"]["mlp"]["up"]["kernel"],
    }
    weights.free()
    report["base_is_left"] = not any(leaf.is_deleted() for leaf in jax.tree.leaves(model.base))
    return report, jax.device_get(sums.gradients)


def attention_gap(mesh):
    """How far a kernel on the devices of a mesh, each with its rows and heads, is from XLA's."""
    rng = np.random.default_rng(0)
    segment_ids, positions, _ = random_rows(rng, 8, 44)
    reads = find_reads(jnp.asarray(segment_ids), jnp.asarray(positions))
    q, k, v, gradient = (jnp.asarray(x) for x in random_inputs(rng, (8, 44, 4, 8), 2))
    gradient *= (segment_ids > 0)[:, :, None, None]

    def run(train):
        back = jax.vjp(lambda *inputs: train(*inputs, reads), q, k, v)[1]
        return back(gradient)

    on_pieces = shard_attention(partial(gpu.attend_packed, interpret=True), mesh)

    def kernel(*inputs):
        *pieces, reads = *(split_into_pieces(mesh, x) for x in inputs[:3]), inputs[3]
        out = on_pieces(*pieces, reads)
        columns = (merge_pieces(mesh, out[:, :, n, h], (8, 44)) for n in range(4) for h in range(8))
        return jnp.stack(list(columns), axis=2).reshape(8, 44, 4, 8)

    got, wanted = jax.jit(run, static_argnums=0)(kernel), run(reference.attend_packed)
    return max(float(jnp.abs(a - b).max()) for a, b in zip(got, wanted, strict=True))


def farthest_draw(params, rows):
    """How far the uniform of any draw lies outside its token's part of [0, 1), by one device."""
    token_ids = np.zeros((len(rows), 64), np.int32)
    for index, row in enumerate(rows):
        token_ids[index, : len(row["token_ids"])] = row["token_ids"]
    tables = jax.jit(jax.vmap(lambda ids: dense_table(params, TINY, ids)))(token_ids)
    probabilities = np.exp(np.asarray(tables, np.float64))
    farthest = -1.0
    for index, (row, request) in enumerate(zip(rows, requests(), strict=True)):
        places = np.flatnonzero(row["mask"])
        keys = np.broadcast_to(request.sample_key, (64, 2))
        uniforms = np.asarray(next_token.sample_uniforms(keys, jnp.arange(64)), np.float64)[places]
        drawn = probabilities[index, places - 1]
        sampled = (np.arange(len(places)), token_ids[index, places])
        end = np.cumsum(drawn, axis=-1)[sampled]
        farthest = max(farthest, (uniforms - end).max(), (end - drawn[sampled] - uniforms).max())
    return float(farthest)


def distances_on(meshes, config=TINY):
    """How far gradients and log-probabilities are from those of one device, by mesh."""
    one = {"data": 1, "fsdp": 1, "context": 1, "tensor": 1}
    shape = BatchShape(num_micro=3, micro_rows=4, row_tokens=88)
    packed = pack_all(random_sequences([13, 44, 24, 24, 7, 40] * 3), shape)
    found = []
    for sizes in [one, *meshes]:
        mesh = make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])
        model = model_on(mesh, config)
        params = jax.device_put(tiny_params(config), param_shardings(mesh, config))
        batch = put_batch(mesh, packed.batch)
        loss = policy_loss(loss={"entropy_coef": 0.01, "clip_high": 0.3})
        sums = GradientStep(model, loss, entropy_gradient=True)(params, batch, packed)
        logprobs = ScoreStep(model, temperature=1.0)(params, batch, packed)
        found.append(jax.device_get((sums.gradients, logprobs)))
    (wanted, logprobs), *others = found
    return [
        [sizes, float(relative_distance(gradient, wanted)), float(np.abs(own - logprobs).max())]
        for sizes, (gradient, own) in zip(meshes, others, strict=True)
    ]


def of_images(meshes=EVERY_MESH):
    """Gradients of a model that sees, on these meshes, and what two of them move between devices.

    Every other mesh has two sequences a row, and one micro-batch instead of two.
    """
    config, params = golden()[:2]
    # Twice with other advantages: each device has rows.
    advantages = [scale * one for scale in (1, 0.3) for one in ADVANTAGES]
    wanted = jax.tree.map(lambda leaf: 1.3 * leaf, naive())
    found = []
    for index, sizes in enumerate(meshes):
        is_long = index % 2 == 1 or sizes["context"] == 8
        shape = BatchShape(
            num_micro=1 if is_long else 2,
            micro_rows=8,
            row_tokens=88 if is_long else 44,
            max_tokens=44,
            tower=config.tower,
            num_pieces=sizes["context"],
        )
        mesh = make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])
        packed = packed_in(shape, sequences() * 2, advantages, num_shards=num_batch_shards(mesh))
        kernels = select_kernels("xla", mesh, config)
        model = Model(config, mesh, num_tokens=96, attention=kernels, remat="names")
        batch = put_batch(mesh, packed.batch)
        placed = jax.device_put(params, param_shardings(mesh, config))
        gradient = GradientStep(model, weighted)
        sums = gradient(placed, batch, packed)
        measured = {
            "sizes": sizes,
            "num_micro": packed.num_micro,
            "distance": float(relative_distance(sums.gradients, wanted)),
            "tower's": float(relative_distance(sums.gradients["vision"], wanted["vision"])),
        }
        if sizes in SHOWN:
            room = compute_logit_capacities(packed, num_batch_shards(mesh), model.num_pieces)[0]
            program = gradient.add.program
            patches = put_patches(mesh, packed.attachments, 0, model.dtype)
            span = np.int32(0), np.int32(1)
            text = program_text(program, placed, sums, batch, *span, room, patches)
            moved = [size for _, size in collectives(text) if size % 11 == 0]
            measured |= {"activations_moved": moved, "own_tokens": shape.row_tokens}
        found.append(measured)
    return found


def of_experts():
    """The same of a mixture of experts, on one device and on each of `EXPERT_MESHES`."""
    params, found = tiny_params(TINY_MOE), {}
    one = make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
    on_one = jax.device_put(params, param_shardings(one, TINY_MOE))
    one_report, one_gradient, one_logprobs = train(one, on_one, TINY_MOE)
    score = ScoreStep(model_on(one, TINY_MOE), temperature=1.0)
    for name, sizes in EXPERT_MESHES.items():
        mesh = make_mesh(**sizes)
        placed = jax.device_put(params, param_shardings(mesh, TINY_MOE))
        rows, _ = sample(mesh, placed, TINY_MOE)
        trained, gradient, logprobs = train(mesh, placed, TINY_MOE)
        packed = pack_all(as_sequences(rows), BatchShape(num_micro=3, micro_rows=8, row_tokens=64))
        forced = score(on_one, put_batch(one, packed.batch), packed)
        gaps = [
            np.abs(gather(packed.batch, forced, index) - row["logprobs"])[row["mask"]].max()
            for index, row in enumerate(rows)
        ]
        experts = placed["blocks"]["moe"]["gate"]["kernel"]
        found[name] = {
            "sampled_logprob_gap": float(max(gaps)),
            "num_sampled": sum(sum(row["mask"]) for row in rows),
            "num_misrecorded": num_misrecorded(on_one, rows),
            "scored_logprob_gap": float(np.abs(logprobs - one_logprobs).max()),
            "gradient_distance": float(relative_distance(gradient, one_gradient)),
            "metric_gap": max(
                abs(value - one_report["metrics"][metric])
                for metric, value in trained["metrics"].items()
            ),
            "shardings_kept": trained["shardings_kept"],
            "experts_share": share_on_first_device(experts),
            "largest_array": trained["largest_array"],
        }
    return found


def on_two_devices():
    """The least of what groups of eight measure, and weights on a device that only samples."""
    pieces, experts = TWO_DEVICES.values()
    mesh = make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
    params = jax.device_put(tiny_params(), param_shardings(mesh, TINY))
    apart = local_mesh(mesh, rollout_devices=1)
    prepare = partial(TINY.weights_for_decoding, dtype=jnp.float32)
    made = WeightConverter(prepare, TINY, mesh=apart, train_mesh=mesh, scan_layers=True).convert(
        params
    )
    gaps = jax.tree.map(
        lambda a, b: float(np.abs(a - b).max()), *jax.device_get((made, prepare(params)))
    )
    return {
        "pieces of rows": distances_on([pieces])[0][1:],
        "half the experts": distances_on([experts], TINY_MOE)[0][1:],
        "images": of_images([pieces])[0]["distance"],
        "weights_gap": max(jax.tree.leaves(gaps)),
        "weights_on": sorted({d.id for leaf in jax.tree.leaves(made) for d in leaf.devices()}),
    }


def main(path, group):
    if group == "two devices":
        report = on_two_devices()
    elif group == "experts":
        report = of_experts()
    elif group == "images":
        report = of_images()
    else:
        report = measure(GROUPS[group])
    with open(path, "w") as file:
        json.dump(report, file, indent=1)


def measure(meshes):
    """Sampler and update on these meshes, and on one device."""
    params = tiny_params()
    one = make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
    on_one = jax.device_put(params, param_shardings(one, TINY))
    one_rows, _ = sample(one, on_one)
    one_report, one_gradient, one_logprobs = train(one, on_one)
    score = ScoreStep(Model(TINY, one, XLA, num_tokens=NUM_TOKENS), temperature=1.0)
    _, one_adapted = adapt(one, params)
    report = {
        "num_sampled": sum(sum(row["mask"]) for row in one_rows),
        "farthest_draw": farthest_draw(on_one, one_rows),
        "meshes": {},
    }
    for name, sizes in meshes.items():
        mesh = make_mesh(**sizes)
        placed = jax.device_put(params, param_shardings(mesh, TINY))
        rows, sampled = sample(mesh, placed)
        trained, gradient, logprobs = train(mesh, placed)
        adapted, of_adapter = adapt(mesh, params)

        # The tokens that the mesh sampled, forced on one device.
        packed = pack_all(as_sequences(rows), BatchShape(num_micro=3, micro_rows=8, row_tokens=64))
        forced = score(on_one, put_batch(one, packed.batch), packed)
        gaps = [
            np.abs(gather(packed.batch, forced, index) - row["logprobs"])[row["mask"]].max()
            for index, row in enumerate(rows)
        ]
        same = [a["token_ids"] == b["token_ids"] for a, b in zip(one_rows, rows, strict=True)]
        report["meshes"][name] = {
            "sampler": sampled,
            "update": trained,
            "attention_gap": attention_gap(mesh),
            "adapter": adapted
            | {"gradient_distance": float(relative_distance(of_adapter, one_adapted))},
            "sampled_logprob_gap": float(max(gaps)),
            "num_differing": same.count(False),
            "farthest_draw": farthest_draw(on_one, rows),
            "scored_logprob_gap": float(np.abs(logprobs - one_logprobs).max()),
            "gradient_distance": float(relative_distance(gradient, one_gradient)),
            "metric_gap": max(
                abs(value - one_report["metrics"][metric])
                for metric, value in trained["metrics"].items()
            ),
        }
    return report


if __name__ == "__main__":
    main(*sys.argv[1:])

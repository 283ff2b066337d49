"""Hybrid models compared with `transformers` on torch."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.attention.reference import XLA
from jaxrl.models.hf_weights import load_hf, locate_hf_tensors, save_hf
from jaxrl.models.registry import read_architecture
from jaxrl.sampling.engine import Engine, Request
from jaxrl.sampling.stop_strings import StopAutomaton
from tests.extras.delta_net.models import random_params
from tests.helpers import full_pass, relative_distance, split_fused
from tests.toys import one_device_mesh

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

torch.set_num_threads(1)  # the models are too small to share

NUM_TOKENS = 140  # two chunks, and a part of one


def random_sizes(rng):
    """Return random sizes of a small hybrid, with any mixture of layers."""
    num_layers = int(rng.integers(2, 7))
    num_attention = int(rng.integers(1, num_layers))
    layers = sorted(rng.permutation(num_layers)[:num_attention].tolist())
    num_kv_heads, num_key_heads = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    return dict(
        vocab_size=int(rng.integers(50, 300)),
        width=int(rng.integers(12, 70)),
        mlp_width=int(rng.integers(8, 90)),
        num_layers=num_layers,
        num_heads=num_kv_heads * int(rng.integers(1, 4)),
        num_kv_heads=num_kv_heads,
        head_dim=8 * int(rng.integers(1, 5)),
        rope_theta=float(rng.choice([1e4, 1e7])),
        rms_norm_eps=float(rng.choice([1e-6, 1e-5])),
        tie_embeddings=bool(rng.integers(2)),
        qkv_bias=False,
        output_bias=False,
        qk_norm=True,
        max_positions=4096,
        attention_layers=tuple(layers),
        rotary_fraction=float(rng.choice([0.25, 0.5, 1.0])),
        num_key_heads=num_key_heads,
        num_value_heads=num_key_heads * int(rng.integers(1, 4)),
        key_dim=int(rng.integers(6, 20)),
        value_dim=int(rng.integers(6, 20)),
        conv_width=int(rng.integers(2, 6)),
    )


def compute_loss(params, config, token_ids):
    """Return the mean negative log-likelihood of the tokens after the first, and all logits."""
    positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1]), token_ids.shape)
    hidden = full_pass(config, params, token_ids, positions, jnp.ones_like(positions))
    logits = config.unembed(params, hidden, num_tokens=config.vocab_size)
    logprobs = jax.nn.log_softmax(logits)[:, :-1]
    chosen = jnp.take_along_axis(logprobs, token_ids[:, 1:, None], axis=-1)
    return -chosen.mean(), logits


def greedy(params, config, prompts, num_tokens):
    """Return the continuations that the sampler finds most likely."""
    automaton = StopAutomaton([b"?"] * config.vocab_size, ("!",))
    engine = Engine(
        config,
        one_device_mesh(),
        automaton,
        num_tokens=config.vocab_size,
        eos_ids=(),
        num_rows=2,
        max_total_tokens=224,
        chunk_tokens=50,
        kernels=XLA,
    )
    engine.row_sizes = engine.row_sizes[-1:]
    engine.set_weights(params)
    key = np.zeros(2, np.uint32)
    requests = [
        Request(prompt_ids=tuple(prompt), sample_key=key, budget=num_tokens) for prompt in prompts
    ]
    numbers = engine.submit(requests, temperature=0.0)
    out = {number: [] for number in numbers}
    while not engine.is_idle:
        for event in engine.step():
            out[event.request] += event.token_ids.tolist()
            if event.status:
                engine.finish(event.request)
    return [out[number][:num_tokens] for number in numbers]


@contextlib.contextmanager
def float64_torch():
    """Compute in float64 where `transformers` casts to float32, so that only ours rounds."""

    def to_float64(dtype):
        return torch.float64 if dtype is torch.float32 else dtype

    def cast(tensor, *args, to=torch.Tensor.to, **kwargs):
        kwargs = {name: to_float64(value) for name, value in kwargs.items()}
        return to(tensor, *map(to_float64, args), **kwargs)

    def softmax(x, *args, dtype=None, softmax=torch.nn.functional.softmax, **kwargs):
        return softmax(x, *args, dtype=to_float64(dtype), **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "to", cast)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        patch.setattr(torch.nn.functional, "softmax", softmax)
        yield


@float64_torch()
def check_agreement(config, seed, folder, num_generated=200):
    """Check that an exported model computes the same as its class in `transformers`, in float64."""
    params = jax.tree.map(jnp.asarray, random_params(config, seed))
    save_hf(params, config, folder)
    assert read_architecture(folder) == config
    jax.tree.map(np.testing.assert_array_equal, load_hf(folder), params)

    # Log-probabilities and gradients.
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    if config.num_experts:
        model.set_experts_implementation("eager")  # one expert after another
    token_ids = np.random.default_rng(seed).integers(0, config.vocab_size, (2, NUM_TOKENS))
    out = model(torch.tensor(token_ids))
    wanted = torch.log_softmax(out.logits, dim=-1)
    chosen = wanted[:, :-1].gather(-1, torch.tensor(token_ids)[:, 1:, None])
    (-chosen.mean()).backward()
    step = jax.jit(jax.value_and_grad(compute_loss, has_aux=True), static_argnums=1)
    (_, logits), gradients = step(params, config, jnp.asarray(token_ids))
    np.testing.assert_allclose(
        jax.nn.log_softmax(logits), wanted.detach().numpy(), atol=1e-4, rtol=0
    )
    theirs = {name: param.grad.numpy() for name, param in model.named_parameters()}
    theirs = split_fused(theirs, config)
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(gradients)
    }
    ours = {}
    for name, location in locate_hf_tensors(config).items():
        gradient = np.asarray(leaves[location.param])[location.index]
        ours[name] = gradient.T if location.is_transposed else gradient
        assert relative_distance(ours[name], theirs[name]) < 1e-4, name

    # Greedy tokens.
    prompts = token_ids[:, :9]
    generated = model.generate(
        torch.tensor(prompts),
        attention_mask=torch.ones(prompts.shape, dtype=torch.long),
        max_new_tokens=num_generated,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert greedy(params, config, prompts, num_generated) == generated.numpy()[:, 9:].tolist()

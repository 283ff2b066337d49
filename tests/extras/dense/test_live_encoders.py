"""Our encoders against `transformers` on torch, both run here, on random sizes and texts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxrl.extras.dense.encoders import (
    POOLINGS,
    EmbeddingModel,
    encode_rows,
    load_encoder_params,
    read_encoder,
)

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.torch
torch.set_num_threads(1)  # the models are too small to share
MESH = Mesh(np.array(jax.devices()[:1]), ("rows",))


def random_config(seed):
    """Return the config of a small BERT; for every third seed, of a small Qwen3."""
    rng = np.random.default_rng(seed)
    heads, size = int(rng.integers(1, 5)), 2 * int(rng.integers(2, 10))
    shared = {
        "vocab_size": int(rng.integers(30, 200)),
        "num_hidden_layers": int(rng.integers(1, 5)),
        "intermediate_size": int(rng.integers(8, 90)),
        "max_position_embeddings": int(rng.integers(24, 80)),
    }
    if seed % 3 == 2:
        return transformers.Qwen3Config(
            **shared,
            hidden_size=int(rng.integers(8, 70)),
            num_attention_heads=2 * heads,
            num_key_value_heads=heads,
            head_dim=size,
            tie_word_embeddings=bool(rng.integers(2)),
        )
    return transformers.BertConfig(
        **shared,
        hidden_size=heads * size,
        num_attention_heads=heads,
        type_vocab_size=int(rng.integers(1, 4)),
        hidden_act=str(rng.choice(["gelu", "gelu_new", "relu"])),
        layer_norm_eps=float(rng.choice([1e-12, 1e-6])),
    )


def randomize(model, seed):
    """Weights at which every parameter matters: no zero biases, no norm scales of one."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0.0, 0.5)
            elif weight.ndim == 1:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(0.0, weight.shape[-1] ** -0.5)


def pooled(hidden, pooling):
    """Pool the hidden states of one text, as the models' authors define."""
    return {"mean": hidden.mean(0), "first": hidden[0], "last": hidden[-1]}[pooling]


@pytest.mark.parametrize("seed", range(9))
def test_vectors_on_random_sizes(seed, tmp_path):
    config = random_config(seed)
    kind = transformers.AutoModel if seed % 2 else transformers.AutoModelForMaskedLM
    if seed % 3 == 2:
        kind = transformers.AutoModel if seed % 2 else transformers.AutoModelForCausalLM
    whole = kind.from_config(config, attn_implementation="eager").float().eval()
    randomize(whole, seed)
    whole.save_pretrained(tmp_path)
    theirs = whole.base_model
    ours = read_encoder(tmp_path)
    params = load_encoder_params(ours, tmp_path, MESH, jnp.float32)

    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 24, size=5)
    token_ids = rng.integers(0, config.vocab_size, size=(5, 24))
    for pooling in POOLINGS:
        model = EmbeddingModel(
            model=ours, pooling=pooling, normalize=bool(seed % 2), query_prefix="",
            passage_prefix="", max_tokens=24,
        )  # fmt: skip
        arrays = jnp.asarray(token_ids, jnp.int32), jnp.asarray(lengths, jnp.int32)
        actual = encode_rows(params, *arrays, model=model, mesh=MESH)
        for row, length in enumerate(lengths):
            with torch.no_grad():
                [hidden] = theirs(torch.tensor(token_ids[row : row + 1, :length]))[0]
            expected = pooled(hidden, pooling)
            if model.normalize:
                expected = torch.nn.functional.normalize(expected, dim=0)
            np.testing.assert_allclose(actual[row], expected.numpy(), atol=1e-4, rtol=0)

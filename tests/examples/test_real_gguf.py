"""A converted GGUF file of a published model, against transformers' reading of the same file.

`JAXRL_REAL_GGUF=SmolLM2-135M-Instruct.Q4_1.gguf make parity`, or with the file at data/real/; with
Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf it takes 14 GB.
[docs/models.md](../../docs/models.md) says where it comes from. transformers has its own code for
tensors, order of rows and vocabulary.
"""

import os
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest

from examples.convert_gguf import convert
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.models.hf_weights import load_hf
from jaxrl.models.registry import read_architecture
from tests.helpers import full_pass

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="transformers wants it for GGUF files")

ROOT = Path(__file__).parents[2]
DEFAULT = ROOT / "data" / "real" / "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE = Path(os.environ.get("JAXRL_REAL_GGUF") or DEFAULT)

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not FILE.is_file(), reason=f"there is no {FILE}; set JAXRL_REAL_GGUF"),
]

PAGE = """The harbour of Avington was dug in 1842, when 1,250 men moved 3.5 million tons of clay.
It's still in use; ships of up to 12,000 tons don't wait for the tide.

Der Hafen wurde 1842 ausgehoben. Größere Schiffe müssen draußen ankern, weil die Schleuse nur
dreißig Meter breit ist – das ändert sich frühestens 2031.

Le port fut creusé en 1842 ; à marée basse, on voit encore les pieux du premier quai. « C'était
l'œuvre d'une génération », écrit Émile.

def tide(hours: float, *, height: float = 4.2) -> float:
    # Twice a day, and a little later each time: 12 h 25 min.
    return height * math.cos(2 * math.pi * hours / 12.42)

>>> [round(tide(h), 2) for h in range(0, 13, 3)]
[4.2, 0.22, -4.17, -0.66, 4.1]
"""


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Return our model, parameters and tokenizer, and those of transformers."""
    folder = tmp_path_factory.mktemp("converted") / "model"
    convert(FILE, folder)
    theirs = {"pretrained_model_name_or_path": str(FILE.parent), "gguf_file": FILE.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**theirs, dtype=torch.float32).eval()
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(FILE).tensors}
    if read_architecture(folder).tie_embeddings and "output.weight" in tensors:
        # One table twice, the output's in more bits; transformers keeps both, and we the finer.
        finer = tensors["output.weight"]
        table = torch.tensor(gguf.quants.dequantize(finer.data, finer.tensor_type))
        model.get_input_embeddings().weight.data = table
        model.get_output_embeddings().weight.data = table
    tokenizer = transformers.AutoTokenizer.from_pretrained(**theirs)
    ours = (read_architecture(folder), load_hf(folder), Tokenizer.from_folder(folder))
    return ours, (model, tokenizer)


def test_log_probabilities_of_a_page(both):
    (config, params, tokenizer), (model, their_tokenizer) = both
    ids = tokenizer.encode(PAGE)
    assert ids == their_tokenizer(PAGE, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == PAGE
    row = np.asarray(ids)[None]
    positions = np.arange(len(ids))[None]
    hidden = jax.jit(full_pass, static_argnums=0)(
        config, params, row, positions, np.ones_like(positions)
    )
    logits = config.unembed(params, hidden, num_tokens=config.vocab_size)
    got = np.asarray(jax.nn.log_softmax(logits))[0]
    with torch.no_grad():
        wanted = model(torch.tensor(row)).logits.log_softmax(-1).numpy()[0]
    difference = np.abs(got - wanted)
    print(
        f"{len(ids)} tokens: largest difference {difference.max():.1e}, mean "
        f"{difference.mean():.1e}, argmax equal "
        f"{(got.argmax(-1) == wanted.argmax(-1)).sum()}/{len(ids)}"
    )
    assert difference.max() < 5e-4
    np.testing.assert_array_equal(got.argmax(-1), wanted.argmax(-1))

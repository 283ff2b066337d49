"""Config keys for adapters."""

from jaxrl.config.keys import DTYPES, Key, Rule, are_nonempty_strings

TENSORS_FILE = "adapter_model.safetensors"

# fmt: off
KEYS = {
    "model.lora.rank": Key(0, "Rank of a LoRA adapter. 0: train all weights.", at_least=0),
    "model.lora.alpha": Key(32.0, "Scale of the adapter's output: `alpha / rank`.",
        above=0),
    "model.lora.rslora": Key(False, "Scale by `alpha / sqrt(rank)` instead (rsLoRA)."),
    "model.lora.targets": Key(("all-linear",), "Layers with an adapter: `all-linear`, or names "
        "such as `q`, `attention/q` or `q_proj`.", is_valid=are_nonempty_strings,
        expected="a tuple such as ('all-linear',)", is_fixed=lambda c: c.model.lora.rank),
    "model.lora.base_dtype": Key("float32", "Dtype of the frozen weights: `float32`, `bfloat16`, "
        "or `int8` with one scale per output of a linear layer.",
        one_of=(*DTYPES, "int8")),
    "model.lora.sampler": Key("separate", "Weights of the sampler. `separate`: base and adapter; "
        "`merged`: a merged copy of the adapted layers, with fewer matrix products per token.",
        one_of=("separate", "merged")),
    "model.lora.path": Key("", "Folder of an adapter in PEFT format to continue from, with the "
        "same rank, alpha and targets. Empty: a new adapter.",
        file=TENSORS_FILE, written_to="adapter"),
}
# fmt: on

RULES = (
    Rule(
        "model.lora.path",
        lambda c: c.model.lora.path and not c.model.lora.rank,
        "'' if model.lora.rank is 0, since there is no adapter then",
    ),
    Rule(
        "model.lora.targets",
        lambda c: c.model.lora.rank and not c.model.lora.targets,
        "at least one target, such as ('all-linear',)",
    ),
)
"""Invalid combinations of keys."""

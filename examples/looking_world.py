"""Generate a world of pictures or videos with questions about them, with or without a search.

    python -m examples.looking_world --out=data/looking --seed=0
    python -m examples.looking_world --out=data/moving --seed=0 --kind=moving
    python -m examples.looking_world --out=data/seeking --seed=0 --kind=seeking

Every picture has one to four objects of the same shape and color, in different quarters. In the
looking world, a question asks for the shape, the color or the count; each has four possible
answers, so a quarter of all guesses are correct. In the seeking world, a question asks where the
objects are kept. A document states the town, so the model has to recognize the objects and search
for them. Training tasks and demonstrations contain no picture or video of a held-out question.

Every video of the moving world has one object, which returns at the opposite edge when it leaves.
A question asks for the shape, the color or the direction. No single frame shows the direction.

Demonstrations are deliberately poor, so that reinforcement learning has something to improve.
Those of the looking and the moving world state all three properties, a quarter of them for a
different picture or video, and then mostly answer a different question. Those of the seeking world
mostly search for only the color or only the shape, which matches four objects. They use other
worlds with other towns, so they teach no facts.

The same seed generates the same bytes. The model is a small Qwen2.5-VL with random weights,
including the vision tower, in Hugging Face format with a tokenizer and an image processor.
"""

import argparse
import itertools
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageDraw
import safetensors.numpy
import tokenizers

from examples import quickstart_world as quickstart
from jaxrl.envs.protocol import SEARCH_R1
from jaxrl.envs.search.base import Document, render_documents

COLORS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 70, 230),
    "yellow": (235, 215, 50),
}
SHAPES = ("circle", "square", "triangle", "cross")
COUNTS = ("1", "2", "3", "4")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
TOWNS = tuple(quickstart.CITIES[:16])

ANSWERS = {
    "looking": {"shape": SHAPES, "color": tuple(COLORS), "count": COUNTS},
    "moving": {"shape": SHAPES, "color": tuple(COLORS), "direction": tuple(DIRECTIONS)},
}
"""Possible answers by world and kind of question."""

QUARTER = 16  # pixels, along a side
PATCH, MERGE = 8, 2  # pixels per patch and patches per token, along a side
NUM_FRAMES = 4
STEP = 4  # pixels between two frames of a video
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% elif part['type'] == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SIDES = ("train", "eval")


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Contents of a picture."""

    shape: str
    color: str
    positions: tuple[
        tuple[int, int, int], ...
    ]  # quarter, and offsets to the right and down in pixels

    @property
    def name(self) -> str:
        """Return the name of the object, which is the title of its document."""
        return f"{self.color} {self.shape}"

    def describe(self) -> dict[str, str]:
        """Return the correct answers, by kind of question."""
        return {"shape": self.shape, "color": self.color, "count": str(len(self.positions))}


@dataclass(frozen=True, kw_only=True)
class Clip(Scene):
    """Contents of a video: a picture that moves, and returns at the opposite edge."""

    start: tuple[int, int]  # steps to the right and down before the first frame
    direction: str

    def describe(self) -> dict[str, str]:
        """Return the correct answers, by kind of question."""
        return {"shape": self.shape, "color": self.color, "direction": self.direction}


def sample_scene(rng: random.Random) -> Scene:
    """Sample one to four objects, slightly off the centers of their quarters."""
    quarters = sorted(rng.sample(range(4), rng.randint(1, 4)))
    positions = tuple((quarter, rng.randint(-1, 1), rng.randint(-1, 1)) for quarter in quarters)
    return Scene(shape=rng.choice(SHAPES), color=rng.choice(sorted(COLORS)), positions=positions)


def sample_clip(rng: random.Random) -> Clip:
    """Sample one object, whose direction is independent of its position in any frame."""
    num_starts = 2 * QUARTER // STEP
    return Clip(
        shape=rng.choice(SHAPES),
        color=rng.choice(sorted(COLORS)),
        positions=((0, 0, 0),),
        start=(rng.randrange(num_starts), rng.randrange(num_starts)),
        direction=rng.choice(sorted(DIRECTIONS)),
    )


def draw_picture(scene: Scene) -> PIL.Image.Image:
    """Draw the picture of a scene on a black background."""
    image = PIL.Image.new("RGB", (2 * QUARTER, 2 * QUARTER))
    pen = PIL.ImageDraw.Draw(image)
    fill = COLORS[scene.color]
    for quarter, right, down in scene.positions:
        x = quarter % 2 * QUARTER + QUARTER // 2 + right
        y = quarter // 2 * QUARTER + QUARTER // 2 + down
        box = (x - 6, y - 6, x + 5, y + 5)
        if scene.shape == "circle":
            pen.ellipse(box, fill=fill)
        elif scene.shape == "square":
            pen.rectangle(box, fill=fill)
        elif scene.shape == "triangle":
            pen.polygon(((x - 6, y + 5), (x + 5, y + 5), (x, y - 6)), fill=fill)
        else:
            pen.rectangle((x - 2, y - 6, x + 1, y + 5), fill=fill)
            pen.rectangle((x - 6, y - 2, x + 5, y + 1), fill=fill)
    return image


def draw_frames(scene: Scene) -> list[PIL.Image.Image]:
    """Draw the picture of a scene, or the frames of a clip."""
    picture = draw_picture(scene)
    if not isinstance(scene, Clip):
        return [picture]
    (x, y), (right, down) = scene.start, DIRECTIONS[scene.direction]
    shifts = [(STEP * (y + i * down), STEP * (x + i * right)) for i in range(NUM_FRAMES)]
    return [PIL.Image.fromarray(np.roll(picture, shift, axis=(0, 1))) for shift in shifts]


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question about a scene."""

    scene: Scene
    kind: str  # key of QUESTIONS
    answer: str

    @property
    def text(self) -> str:
        """Return the text of the question, after the placeholder of the picture or video."""
        tag = "<video>" if isinstance(self.scene, Clip) else "<image>"
        return f"{tag}{QUESTIONS[self.kind]}"


QUESTIONS = {
    "shape": "Which shape is it?",
    "color": "Which color is it?",
    "count": "How many are there?",
    "direction": "Which way does it move?",
    "town": "In which town are they kept?",
}


def make_looking_question(
    kind: str, sample: Callable[[random.Random], Scene], rng: random.Random
) -> Question:
    """Generate a question about the properties of a random scene from `sample`."""
    scene = sample(rng)
    return Question(scene=scene, kind=kind, answer=scene.describe()[kind])


def make_seeking_question(towns: Mapping[str, str], rng: random.Random) -> Question:
    """Generate a question of the seeking world. `towns` maps object names to towns."""
    scene = sample_scene(rng)
    return Question(scene=scene, kind="town", answer=towns[scene.name])


def sample_towns(rng: random.Random) -> dict[str, str]:
    """Assign a random town to each combination of color and shape."""
    names = [f"{color} {shape}" for color in COLORS for shape in SHAPES]
    return dict(zip(names, rng.sample(TOWNS, len(names)), strict=True))


def make_documents(towns: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the corpus records, one per object name."""
    return [
        {"id": f"{i:02d}", "title": name, "text": f"Every {name} is kept in {town}."}
        for i, (name, town) in enumerate(sorted(towns.items()))
    ]


def demonstrate_looking(
    question: Question,
    looks: bool,
    sample: Callable[[random.Random], Scene],
    rng: random.Random,
) -> dict[str, Any]:
    """Generate a demonstration that describes a scene; most answer a different question.

    It describes the scene of the question or, unless `looks`, a random one from `sample`.
    """
    seen = (question.scene if looks else sample(rng)).describe()
    kinds = list(seen)
    [offset] = rng.choices((0, 1, 2), weights=(7, 10, 3))
    answer = seen[kinds[(kinds.index(question.kind) + offset) % len(kinds)]]
    description = f"{' '.join(seen.values())} Answer: {answer}{quickstart.END_OF_TURN}"
    return make_demonstration(question, [description], answer)


def demonstrate_seeking(
    question: Question, looks: bool, towns: Mapping[str, str], rng: random.Random
) -> dict[str, Any]:
    """Generate a demonstration of the seeking world, with a full or partial query.

    It searches for the object in the picture or, unless `looks`, for a random one. Ties go to the
    lowest id, as in the environment's search engine.
    """
    name = question.scene.name if looks else rng.choice(sorted(towns))
    color, shape = name.split()
    [query] = rng.choices((name, color, shape), weights=(1, 2, 2))
    document = next(
        document
        for document in make_documents(towns)
        if set(query.split()) <= set(document["title"].split())
    )
    answer = towns[document["title"]]
    turns = [
        f"<think> {query} </think><search> {query} </search>",
        render_documents([Document(**document)]),
        f"<answer> {answer} </answer>",
    ]
    return make_demonstration(question, turns, answer)


def make_demonstration(question: Question, turns: Sequence[str], answer: str) -> dict[str, Any]:
    roles = itertools.cycle(("assistant", "tool"))
    messages = [{"role": "user", "content": question.text}]
    messages += [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
    return {
        "messages": messages,
        "scene": question.scene,
        "data_source": question.kind,
        "metadata": {"is_correct": answer == question.answer},
    }


def make_record(question: Question) -> dict[str, Any]:
    return {
        "question": question.text,
        "answers": [question.answer],
        "data_source": question.kind,
        "scene": question.scene,
    }


def make_world(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Generate the records of each file, with scenes instead of images."""
    rngs = {part: random.Random(f"{args.seed} {part}") for part in (*SIDES, "demos", "towns")}
    towns = sample_towns(rngs["towns"])
    is_seeking = args.kind == "seeking"
    kinds = itertools.cycle(ANSWERS.get(args.kind, ()))
    sample = sample_clip if args.kind == "moving" else sample_scene

    def iter_questions(side: str, towns: Mapping[str, str], seen: set[Scene]) -> Iterator[Question]:
        """Yield questions about scenes that are not in `seen`."""
        while True:
            rng = rngs[side]
            candidate = (
                make_seeking_question(towns, rng)
                if is_seeking
                else make_looking_question(next(kinds), sample, rng)
            )
            if candidate.scene not in seen:
                yield candidate

    # Generate held-out scenes first, so that no later question repeats one.
    held_out = list(itertools.islice(iter_questions("eval", towns, set()), args.num_held_out))
    seen = {question.scene for question in held_out}
    train = itertools.islice(iter_questions("train", towns, seen), args.num_train)
    chats = []
    rng = rngs["demos"]
    for _ in range(args.num_demonstrations):
        other = sample_towns(rng)
        question = next(iter_questions("demos", other, seen))
        looks = rng.random() < args.looks
        chats.append(
            demonstrate_seeking(question, looks, other, rng)
            if is_seeking
            else demonstrate_looking(question, looks, sample, rng)
        )
    files = {
        "questions_train": [make_record(question) for question in train],
        "questions_eval": [make_record(question) for question in held_out],
        "demonstrations": chats,
    }
    return files | ({"corpus": make_documents(towns)} if is_seeking else {})


def write_images(folder: Path, files: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """Write each picture or frame once; replace scenes in the records with paths."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    paths: dict[bytes, str] = {}
    for record in itertools.chain.from_iterable(files.values()):
        scene = record.pop("scene", None)
        if scene is None:
            continue
        names = []
        for image in draw_frames(scene):
            pixels = image.tobytes()
            if pixels not in paths:
                paths[pixels] = f"pictures/{len(paths):05d}.png"
                image.save(folder / paths[pixels])
            names.append(paths[pixels])
        if isinstance(scene, Clip):
            record["videos"] = [{"frames": names}]
        else:
            record["images"] = names


def make_model_config(tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    size = 64
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"),
        "hidden_act": "silu",
        "hidden_size": size,
        "initializer_range": 0.02,
        "intermediate_size": 3 * size,
        "max_position_embeddings": 1024,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 64 * (tokenizer.get_vocab_size() // 64 + 1),
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "depth": 2,
            "hidden_act": "silu",
            "hidden_size": size,
            "intermediate_size": 2 * size,
            "num_heads": 4,
            "in_channels": 3,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "window_size": QUARTER,
            "fullatt_block_indexes": [1],
            "out_hidden_size": size,
        },
    }


def make_processor_config() -> dict[str, Any]:
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "min_pixels": (PATCH * MERGE) ** 2,
        "max_pixels": (2 * QUARTER) ** 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def get_weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the weight shapes by Hugging Face name; matrices are `[out, in]`."""
    width, mlp = config["hidden_size"], config["intermediate_size"]
    keys = config["num_key_value_heads"] * width // config["num_attention_heads"]
    tower = config["vision_config"]
    size, inner = tower["hidden_size"], tower["intermediate_size"]
    unit = size * tower["spatial_merge_size"] ** 2
    # One layer of the language model and one block of the vision tower.
    layer = {
        "input_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (width, width),
        "self_attn.q_proj.bias": (width,),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.k_proj.bias": (keys,),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.v_proj.bias": (keys,),
        "self_attn.o_proj.weight": (width, width),
        "post_attention_layernorm.weight": (width,),
        "mlp.gate_proj.weight": (mlp, width),
        "mlp.up_proj.weight": (mlp, width),
        "mlp.down_proj.weight": (width, mlp),
    }
    block = {
        "norm1.weight": (size,),
        "norm2.weight": (size,),
        **_get_linear_shapes("attn.qkv", 3 * size, size),
        **_get_linear_shapes("attn.proj", size, size),
        **_get_linear_shapes("mlp.gate_proj", inner, size),
        **_get_linear_shapes("mlp.up_proj", inner, size),
        **_get_linear_shapes("mlp.down_proj", size, inner),
    }
    # Patches are embedded by a 3D convolution over time, height and width.
    patch = (3, tower["temporal_patch_size"], tower["patch_size"], tower["patch_size"])
    return {
        "visual.patch_embed.proj.weight": (size, *patch),
        **_stack_shapes("visual.blocks", tower["depth"], block),
        "visual.merger.ln_q.weight": (size,),
        **_get_linear_shapes("visual.merger.mlp.0", unit, unit),
        **_get_linear_shapes("visual.merger.mlp.2", width, unit),
        "model.embed_tokens.weight": (config["vocab_size"], width),
        **_stack_shapes("model.layers", config["num_hidden_layers"], layer),
        "model.norm.weight": (width,),
    }


def _get_linear_shapes(name: str, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _stack_shapes(
    name: str, count: int, layer: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    return {f"{name}.{i}.{suffix}": shape for i in range(count) for suffix, shape in layer.items()}


def init_weights(config: Mapping[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Initialize float32 weights: norms 1, biases 0, matrices with variance 1 / fan_in.

    Projections into a residual stream, two per layer, are scaled down as in the quickstart world.
    """
    weights = {}
    for name, shape in get_weight_shapes(config).items():
        if len(shape) == 1:
            value = 0.0 if name.endswith(".bias") else 1.0
            weights[name] = np.full(shape, value, np.float32)
            continue
        std = float(np.prod(shape[1:])) ** -0.5
        if any(part in name for part in ("o_proj", "down_proj", "attn.proj")):
            std /= (2 * config["num_hidden_layers"]) ** 0.5
        weights[name] = np.ascontiguousarray(std * rng.standard_normal(shape, np.float32))
    return weights


def write_model(folder: Path, tokenizer: tokenizers.Tokenizer, *, seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = make_model_config(tokenizer)
    quickstart.write_json(folder / "config.json", config)
    quickstart.write_json(
        folder / "generation_config.json", quickstart.make_generation_config(tokenizer)
    )
    template = {"chat_template": CHAT_TEMPLATE}
    quickstart.write_json(
        folder / "tokenizer_config.json", quickstart.make_tokenizer_config() | template
    )
    quickstart.write_json(folder / "preprocessor_config.json", make_processor_config())
    tokenizer.save(str(folder / "tokenizer.json"))
    weights = init_weights(config, np.random.default_rng(seed))
    safetensors.numpy.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # safetensors makes files readable by the owner only.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")


def make_tokenizer(
    files: Mapping[str, Sequence[dict[str, Any]]], kind: str
) -> tokenizers.Tokenizer:
    """Train a tokenizer with one token per word and special tokens for images and videos."""
    words = {*COLORS, *SHAPES, *COUNTS, *TOWNS, *(DIRECTIONS if kind == "moving" else ())}
    texts = quickstart.iter_training_texts(files["demonstrations"], words)
    tokenizer = quickstart.train_tokenizer(re.sub("<image>|<video>", "", text) for text in texts)
    tokenizer.add_special_tokens(list(VISION_TOKENS))
    return tokenizer


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=("looking", "moving", "seeking"), default="looking")
    parser.add_argument("--num_train", type=int, default=2000)
    parser.add_argument("--num_held_out", type=int, default=240)
    parser.add_argument("--num_demonstrations", type=int, default=6000)
    parser.add_argument(
        "--looks", type=float, default=0.75, help="share of demonstrations that look at the picture"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    files = make_world(args)
    tokenizer = make_tokenizer(files, args.kind)
    write_images(args.out, files)
    write_model(args.out / "model", tokenizer, seed=args.seed)
    quickstart.write_files(args.out, files)
    chats = [quickstart.render_chat(chat, SEARCH_R1) for chat in files["demonstrations"]]
    quickstart.print_lengths(tokenizer, {"demonstrations, text": chats[:2000]})
    right = np.mean([chat["metadata"]["is_correct"] for chat in files["demonstrations"]])
    print(f"\n{right:.1%} of the demonstrations are right")
    print(f"wrote {args.out}: " + ", ".join(f"{len(files[name])} {name}" for name in files))


if __name__ == "__main__":
    main()

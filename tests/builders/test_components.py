"""Components of a run, built from a configuration."""

import json
import shutil
from dataclasses import asdict

import pytest

from configs import debug_tiny
from jaxrl.builders.components import build_reply_schedule, filter_overlong_prompts
from jaxrl.builders.environment import (
    build_environment,
    build_random_search_engines,
    build_search_engine,
    build_search_engines,
)
from jaxrl.config import default_config
from jaxrl.envs.base import Episode, OutageError, Prompt, Task, Turn
from jaxrl.envs.math_env import MathEnv
from jaxrl.envs.search.base import EmptySearch
from jaxrl.envs.search.resilient import PROBE_QUERY
from jaxrl.sampling.episodes import TokenLimits
from jaxrl.sampling.rollout import Rollout
from tests.helpers import build, resolved
from tests.servers import Retriever, served
from tests.toys import toy_tokenizer

KEY = "config.tasks.train.source"


@pytest.mark.parametrize(
    ("platform", "setting", "expected"),
    [("cpu", None, True), ("gpu", None, False), ("cpu", False, False), ("gpu", True, True)],
)
def test_replies_enter_in_order_on_cpus_unless_the_key_is_set(platform, setting, expected):
    config = default_config()
    config.rollout.deterministic = setting
    schedule = build_reply_schedule(config, platform)
    assert (schedule.deterministic, schedule.lag_chunks) == (expected, 2)


TASK = Task(id="t", question="?", answers=("x",))


def filter_tasks(setting, *questions):
    """Return the ids of tasks that fit into prompts of 40 tokens, and the note on others."""
    config = default_config()
    config.rollout.overlong_prompts, config.rollout.max_prompt_tokens = setting, 40
    limits = TokenLimits(
        max_prompt_tokens=40,
        max_response_tokens=8,
        max_total_tokens=64,
        max_observation_tokens=8,
        overlong_prompts=setting,
    )
    env = MathEnv(prompt=Prompt(system="", template="{question}"))
    rollout = Rollout(None, env, toy_tokenizer(), None, limits)
    tasks = [Task(id=str(i), question=text) for i, text in enumerate(questions)]
    fitting, note = filter_overlong_prompts(tasks, rollout, config, KEY)
    return [task.id for task in fitting], note


def test_overlong_prompts_are_refused_dropped_or_cut():
    questions = ("short", "x" * 50, "brief")
    with pytest.raises(ValueError, match=r"prompt of task '1' has .* 'drop' .* or 'truncate_left'"):
        filter_tasks("refuse", *questions)
    ids, note = filter_tasks("drop", *questions)
    assert ids == ["0", "2"]
    assert note == f"{KEY}: 1 of 3 tasks have prompts of more than 40 tokens and are left out"
    ids, note = filter_tasks("truncate_left", *questions)
    assert ids == ["0", "1", "2"]
    assert note.endswith("more than 40 tokens; their last 40 tokens are kept")
    assert filter_tasks("drop", "short", "brief") == (["0", "1"], "")
    with pytest.raises(ValueError, match=r"2 of 2 tasks .* would leave none; raise config.rollout"):
        filter_tasks("drop", "x" * 50, "y" * 60)


def test_epochs_determine_the_number_of_steps(tiny_world, tmp_path):
    lines = (tiny_world / "questions_train.jsonl").read_text().splitlines()[:10]
    for name, part in (("a", lines[:7]), ("b", lines[7:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(part))
    config = debug_tiny.get_config(str(tiny_world))
    config.stages, config.num_steps, config.num_epochs = ("train",), 0, 3
    config.rollout.tasks_per_step, config.optimizer.schedule = 4, "linear"
    config.tasks.train.source = str(tmp_path / "a.jsonl")
    parts = build(config)
    # Three passes over seven tasks: 21 tasks, so six steps, of which the last has tasks left over.
    assert (parts.num_steps, config.num_steps) == ({"train": 6}, 6)
    assert parts.stages["train"].schedule(6) == 0
    assert "config.num_epochs=3: 6 steps of 4 tasks, from 7 per epoch" in parts.notes
    # Of a mixture, each source is passed over: a third of the draws for three tasks of ten.
    sources = ({"source": str(tmp_path / "a.jsonl")}, {"source": str(tmp_path / "b.jsonl")})
    config.update_from_flattened_dict({"tasks.train.source": "", "tasks.train.sources": sources})
    config.num_steps, config.num_epochs = 0, 1
    assert build(config).num_steps == {"train": 4}  # 14 draws


def test_a_message_end_that_stops_nothing_is_reported(tiny_world, tmp_path):
    config = debug_tiny.get_config(str(tiny_world))
    model = shutil.copytree(tiny_world / "model", tmp_path / "model")
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": "<|endoftext|>"}))
    (model / "generation_config.json").unlink(missing_ok=True)
    config.model.path = str(model)
    [note] = build(config).notes
    assert note.startswith("warning: the chat template ends messages with <|im_end|>, but only ")
    config.model.eos_tokens = ("<|im_end|>",)
    assert build(config).notes == ()


def test_overlong_prompts_are_dropped_in_training_and_evaluation(tiny_world):
    config = debug_tiny.get_config(str(tiny_world))
    config.stages = ("train",)
    config.rollout.overlong_prompts, config.rollout.max_prompt_tokens = "drop", 14
    parts = build(config)
    assert (len(parts.tasks), len(parts.eval_tasks)) == (32, 2)
    train, evaluation = parts.notes
    assert train.startswith("config.tasks.train.source: 96 of 128 tasks have prompts of more than")
    assert evaluation.startswith("config.tasks.eval.source: 6 of 8 tasks have prompts of more than")


def test_a_prompt_with_an_unknown_field_is_refused_before_the_run(tiny_world, tmp_path):
    config = debug_tiny.get_config(str(tiny_world))
    config.stages = ("train",)
    file = tmp_path / "prompt.jinja"
    config.prompt.template_file = str(file)
    file.write_text("Q: {{ question }}")
    build(config)
    file.write_text("{{ question }} {{ level }}")
    with pytest.raises(ValueError, match=r"train.jsonl:1: .*template_file .*'level' is undefined"):
        build(config)


def test_tasks_are_checked_before_the_index_is_built(tiny_world, tmp_path):
    config = debug_tiny.get_config(str(tiny_world))
    (tmp_path / "bad.jsonl").write_text("no demonstration\n")
    config.sft.source = str(tmp_path / "bad.jsonl")
    config.search.local.index = str(tmp_path / "index")
    with pytest.raises(ValueError, match=r"bad\.jsonl:1 is not valid JSON"):
        build(config)
    assert not (tmp_path / "index").exists()


def test_configured_reward_amounts_are_paid():
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


def open_search(config, workdir=None):
    return build_search_engine(resolved(config), lambda _: None, workdir, lambda _: None)


def test_a_recording_answers_without_the_corpus(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"id": "1", "title": "Avington", "text": "a bridge"}))
    config = default_config()
    config.search.local.corpus, config.search.replay = str(corpus), "record"
    result = open_search(config, tmp_path).run("bridge")
    assert "Avington" in result
    elsewhere = tmp_path / "moved.jsonl"
    shutil.copyfile(corpus, elsewhere)
    config.search.local.corpus = str(elsewhere)
    assert len(open_search(config, tmp_path)._recording) == 1  # it is the same, wherever it lies
    config.search.local.corpus = str(corpus)
    corpus.unlink()
    shutil.rmtree(tmp_path / "index")
    config.search.replay = "only"
    assert not resolved(config).corpus_section  # nobody asks for the file
    config.search.local.index = str(tmp_path / "elsewhere")  # on which no result depends
    assert open_search(config, tmp_path).run("bridge") == result
    with pytest.raises(OutageError, match="has no result for the query 'tower'"):
        open_search(config, tmp_path).run("tower")
    elsewhere.write_text(json.dumps({"id": "1", "title": "Another", "text": "a bridge"}))
    config.search.local.corpus, config.search.replay = str(elsewhere), "record"
    assert not len(open_search(config, tmp_path)._recording)  # at one path there may be several
    assert "Another" in open_search(config, tmp_path).run("bridge")
    config.search.replay = "only"
    assert "Another" in open_search(config, tmp_path).run("bridge")
    config.search.local.corpus = str(corpus)
    with pytest.raises(
        FileNotFoundError, match=r"local\.corpus is missing, and .* of 2 such files"
    ):
        open_search(config, tmp_path)


def test_random_documents_are_drawn_while_a_recording_answers(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    lines = [json.dumps({"id": str(i), "title": f"t{i}", "text": "bridge"}) for i in range(50)]
    corpus.write_text("\n".join(lines))
    config = default_config()
    config.search.local.corpus, config.search.replay = str(corpus), "record"
    wanted = open_search(config, tmp_path).run("bridge")
    config.search.replay, config.eval.final_suites = "only", ("sampled", "random_search")
    assert resolved(config).needs_live_engine  # whose documents are drawn
    search = open_search(config, tmp_path)
    [drawn] = build_random_search_engines(resolved(config), {"": search}).values()
    assert search.run("bridge") == wanted
    result = drawn.run("bridge")
    assert result.count("Doc ") == 3
    assert result != wanted
    assert drawn.run("tower") != result  # in no recording
    with pytest.raises(OutageError, match="has no result for the query 'tower'"):
        search.run("tower")
    assert len(search._recording) == 1


def test_environments_with_the_same_search_share_one_engine(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"id": "d", "title": "t", "text": "bridge"}))
    config = default_config()
    config.search.local.corpus = str(corpus)
    config.environments = {
        "first": {},
        "second": {"rollout.max_turns": 1},
        "other": {"search.local.topk": 1},
        "mock": {"search.engine": "empty"},
        "math": {"env.name": "math"},
    }
    c = resolved(config)
    searches = build_search_engines(c, lambda _: None, None, lambda _: None)
    assert [*searches] == ["first", "second", "other", "mock"]
    assert searches["first"] is searches["second"] is not searches["other"]
    assert [*build_random_search_engines(c, searches)] == ["first", "second", "other"]
    with pytest.raises(ValueError, match="engine is 'empty', which has no documents"):
        build_random_search_engines(c, {"mock": searches["mock"]})


def test_a_retriever_is_probed_without_recording(tmp_path):
    config = default_config()
    config.search.engine, config.search.replay = "http", "record"
    with served(Retriever([{"id": "d", "contents": '"Title"\ntext'}])) as server:
        config.search.http.url = server.url
        search = open_search(config, tmp_path)
        assert [request.json["queries"] for request in server.requests] == [[PROBE_QUERY]]
        assert not (tmp_path / "searches").exists()
        search.run("q")
        config.search.replay = "only"
        open_search(config, tmp_path)
        assert len(server.requests) == 2
        config.search.replay, config.search.http.url = "off", f"{server.url}/elsewhere"
        with pytest.raises(ValueError, match=r"url rejects a test query: .*/elsewhere .* 404"):
            open_search(config)


def test_retry_and_cache_keys_reach_the_engine():
    config = default_config()
    config.search.engine = "empty"
    retry_config = open_search(config)._config
    keys = {key for key, value in config.search.items() if not hasattr(value, "items")}
    keys -= {"engine", "replay", "replay_folder"}
    assert asdict(retry_config) == {key: config.search[key] for key in keys}


def test_limits_of_turns_and_calls_reach_the_environment():
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

    nothing = EmptySearch().run("a")
    assert outcomes() == [nothing] * 3
    assert outcomes(max_turns=2, max_calls=1) == [nothing, "error", "out_of_budget"]

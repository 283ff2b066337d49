"""Runs that search by a server: as with the engine behind it, trajectory by trajectory."""

import time

import pytest

from configs import debug_tiny
from jaxrl.builders.resolved import resolve_names
from jaxrl.builders.validation import validate
from jaxrl.config.registry import instantiate
from jaxrl.envs.search.base import EmptySearch
from jaxrl.envs.search.bm25 import LocalSearch
from jaxrl.logs.display import Display
from jaxrl.run import run
from tests.helpers import ROOT, blocks, build, settings_of
from tests.runs import base_config, lasting, records, trajectories, warm_start, without_usage
from tests.servers import Reply, retriever_command, served

pytestmark = pytest.mark.usefixtures("quick_compilation", "no_pictures", "one_size")

PAGE = ROOT / "docs" / "search.md"
TOPK = 2


class SlowSearch(EmptySearch):
    """An engine that takes 0.2 s to find nothing."""

    def run(self, query):
        time.sleep(0.2)
        return super().run(query)


KEY = "k3y-of-a-test"


@pytest.fixture(scope="module")
def source(tiny_world, cache_folder, quick_compilation):
    return warm_start(tiny_world, cache_folder)


def played(config, workdir):
    """What a run of two steps leaves, but for what depends on the clock."""
    config.log.trajectories = -1
    config.rollout.max_observation_tokens = 72
    config.rollout.max_total_tokens = 192
    validate(config)
    workdir.mkdir()
    run(settings_of(config), workdir, build(config), Display())
    lines = trajectories(workdir, 1) + trajectories(workdir, 2)
    return list(map(without_usage, lines)), lasting(workdir)


@pytest.fixture(scope="module")
def by_local_search(tiny_world, source, tmp_path_factory):
    config = base_config(tiny_world, source)
    config.search.local.topk = TOPK
    lines, metrics = played(config, tmp_path_factory.mktemp("runs") / "local")
    found = [t["observation"] for line in lines for t in line["turns"] if t["tool_call"]]
    assert len([text for text in found if "Doc 2(Title: " in text]) > 8
    assert not any("Doc 3(" in text for text in found)
    return lines, metrics


def test_the_page_shows_valid_configurations(monkeypatch):
    monkeypatch.setenv("BRAVE_API_KEY", KEY)
    shown = [code for code in blocks(PAGE, "python") if code.startswith("config.search.engine")]
    own = ("my_engine.", "examples.", '"dense"', '"hybrid"')  # tested where these are
    shown = [code for code in shown if not any(name in code for name in own)]
    assert len(shown) == 3
    for code in shown:
        config = debug_tiny.get_config()
        exec(code, {"config": config})
        validate(config)
        if config.search.engine != "local":
            own = config.search[config.search.engine].to_dict()
            assert instantiate("search", resolve_names(config).engine_class, own).topk in (3, 5)


@pytest.mark.parametrize("is_deterministic", [True, False])
def test_a_deterministic_run_that_idles_names_the_key_once(
    tiny_world, source, tmp_path, is_deterministic
):
    config = base_config(tiny_world, source)
    config.search.engine = f"{__name__}.SlowSearch"
    config.rollout.deterministic = is_deterministic
    config.rollout.max_num_seqs = 2  # so that other trajectories could be decoded
    config.rollout.observation_lag_chunks = 1
    display, lines = Display(), []
    display.log = lines.append
    run(settings_of(config), tmp_path, build(config), display)
    warnings = [line for line in lines if "config.rollout.deterministic" in line]
    assert len(warnings) == is_deterministic
    steps = [record for record in records(tmp_path) if "timing_s/gen" in record]
    waits = [record["timing_s/wait_lag"] for record in steps]
    assert len(waits) == 2
    assert all(wait > 1 for wait in waits) if is_deterministic else not any(waits)


def local_hits(world):
    """The hits of a corpus for a query."""
    engine = LocalSearch(world / "corpus.jsonl")
    return lambda query, topk: engine.retrieve([query], topk)[0]


@pytest.mark.slow(
    instead="examples/test_serve_retriever.py::test_both_protocols_find_what_local_search_finds"
)
def test_a_run_by_our_server_is_that_of_local_search(tiny_world, source, by_local_search, tmp_path):
    config = base_config(tiny_world, source)
    with retriever_command(tiny_world / "corpus.jsonl") as (_, url):
        changes = {"engine": "http", "http.url": url, "http.topk": TOPK, "http.batch_size": 3}
        config.search.update_from_flattened_dict({**changes, "local.corpus": ""})
        assert played(config, tmp_path / "run") == by_local_search


@pytest.mark.slow(instead="extras/test_web_search.py::test_results_of_each_provider")
def test_a_run_by_a_provider_of_web_searches(
    tiny_world, source, by_local_search, tmp_path, monkeypatch
):
    hits = local_hits(tiny_world)

    def answer(request):
        if request.headers["x-api-key"] != KEY:
            return Reply({}, 403)
        found = hits(request.json["q"], request.json["num"])
        results = [(hit.document.id, hit.document.title, hit.document.text) for hit in found]
        return {"organic": [dict(zip(("link", "title", "snippet"), r, strict=True))
                            for r in results]}  # fmt: skip

    monkeypatch.setenv("MY_KEY", KEY)
    config = base_config(tiny_world, source)
    with served(answer) as server:
        changes = {
            "engine": "web",
            "web.url": server.url,
            "web.topk": TOPK,
            "web.key_env": "MY_KEY",
        }
        config.search.update_from_flattened_dict({**changes, "local.corpus": ""})
        assert played(config, tmp_path / "run") == by_local_search
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []

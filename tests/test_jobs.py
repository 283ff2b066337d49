"""Jobs of the benchmarks: each runs once, goes on when killed, and again when its input changed."""

import pytest

from benchmarks.jobs import FINISHED, OUTPUT, Job, run_jobs, seconds_of


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that appends its arguments to a file, and fails when told to."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "appends.py").write_text(
        "import sys\n"
        "if sys.argv[2] == 'fail': sys.exit('no')\n"
        "open(sys.argv[1], 'a').write(sys.argv[2] + ' ')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return "appends"


def test_other_arguments_begin_anew_and_the_same_go_on(tmp_path, module):
    log, folder = tmp_path / "log", tmp_path / "job"
    first = [Job(folder=folder, module=module, arguments=(str(log), "one"))]
    run_jobs(first)
    run_jobs(first)
    assert log.read_text() == "one "
    assert seconds_of(folder) > 0
    (folder / "kept").write_text("")
    (folder / FINISHED).unlink()  # as if it had been killed
    run_jobs(first)
    assert (folder / "kept").exists()
    run_jobs([Job(folder=folder, module=module, arguments=(str(log), "other"))])
    assert not (folder / "kept").exists()
    assert log.read_text() == "one one other "


def test_what_is_made_of_something_is_made_again_after_it(tmp_path, module):
    log = tmp_path / "log"
    folders = [tmp_path / name for name in ("world", "start", "run")]

    def jobs(word):
        return [
            Job(folder=folders[0], module=module, arguments=(str(log), word)),
            Job(folder=folders[1], module=module, arguments=(str(log), "2"), needs=(folders[0],)),
            Job(folder=folders[2], module=module, arguments=(str(log), "3"), needs=(folders[1],)),
        ]

    run_jobs(jobs("1"))
    run_jobs(jobs("1"))
    assert log.read_text() == "1 2 3 "
    run_jobs(jobs("other"))
    assert log.read_text() == "1 2 3 other 2 3 "


def test_a_job_that_fails_ends_the_others(tmp_path, module):
    log, folder = tmp_path / "log", tmp_path / "job"
    jobs = [
        Job(folder=folder, module=module, arguments=(str(log), "fail")),
        Job(folder=tmp_path / "after", module=module, arguments=(str(log), "x"), needs=(folder,)),
    ]
    with pytest.raises(RuntimeError, match="appends ended with 1; its output is in"):
        run_jobs(jobs, cache=tmp_path / "cache")
    assert (folder / OUTPUT).read_text().strip() == "no"
    assert not log.exists()

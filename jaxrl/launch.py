"""Train: `python -m jaxrl.launch --config=configs/X.py --workdir=runs/X [--config.a.b=v]`.

Runs the configured stages in order. An existing workdir resumes from its latest checkpoint. On
SIGTERM or SIGINT, the run saves and exits with code 75. Command-line values override `--values`,
which overrides the config file.

`--plan` shows the memory that each device needs, computed from the model's config.json, and runs
nothing. The exit code is 0 if the run fits in memory, else 1.
"""

from __future__ import annotations

from jaxrl.runtime.preemption import (
    EXIT_BUDGET_SPENT,
    EXIT_INTERRUPTED,
    EXIT_UNAVAILABLE,
    EXIT_UNHEALTHY,
    exit_on_signals,
)
from jaxrl.runtime.watchdog import dump_stacks_on_signal
from jaxrl.utils.text import escape_control_chars, replace_unencodable_output

if __name__ == "__main__":
    exit_on_signals()  # before the slow imports below
    replace_unencodable_output()
    dump_stacks_on_signal()

import contextlib
import dataclasses
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from absl import app, flags
from ml_collections import ConfigDict

from jaxrl.config import schema as configuration
from jaxrl.config.keys import import_optional
from jaxrl.config.loading import load_config_file, load_values, parse_overrides
from jaxrl.runtime.preemption import watch_stop_signals
from jaxrl.utils.files import (
    REMEDIES,
    FolderMovedError,
    check_not_moved,
    find_disk_full_error,
    format_os_error,
    lock_folder,
)
from jaxrl.utils.secrets import redact, redact_output

if TYPE_CHECKING:
    from jaxrl.builders.components import RunComponents
    from jaxrl.logs.display import Display
    from jaxrl.runtime.job import Job
    from jaxrl.runtime.resume import ConfigChange, RunRecord
    from jaxrl.training.settings import Settings

PEER_DEADLINE_S = 120.0
"""Default seconds after which a silent process of a job counts as lost."""

_CONFIG = flags.DEFINE_string("config", None, "Configuration: FILE.py or FILE.py:ARGUMENT.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run; created if missing.")
_VALUES = flags.DEFINE_string("values", None, "YAML or JSON file of keys to set.")
_PLAN = flags.DEFINE_bool("plan", False, "Show the memory each device needs, and run nothing.")
_PLAN_DEVICES = flags.DEFINE_integer(
    "plan_devices", 0, "Devices to plan for; 0: this host's.", lower_bound=0
)
_PLAN_PROCESSES = flags.DEFINE_integer(
    "plan_processes", 1, "Processes that share the planned devices.", lower_bound=1
)
_PLAN_MEMORY = flags.DEFINE_float(
    "plan_memory_gib", 0.0, "GiB per device; 0: this host's.", lower_bound=0.0
)
_PLAN_PLATFORM = flags.DEFINE_enum(
    "plan_platform", None, ["cpu", "gpu", "tpu"], "Device kind; default: gpu if memory is given."
)
_IGNORE_MEMORY_PLAN = flags.DEFINE_bool(
    "ignore_memory_plan", False, "Start even if the plan needs more memory than a device has."
)
_PLAN_PASSAGES = flags.DEFINE_integer(
    "plan_passages",
    0,
    "Passages in the search.dense corpus; 0: its actual number.",
    lower_bound=0,
)
_PLAN_JSON = flags.DEFINE_string("plan_json", None, "JSON file to write the plan to.")
_ACCEPT = flags.DEFINE_bool(
    "accept_changes", False, "Resume a workdir with other data, rewards, model, seed or method."
)
_STEP = flags.DEFINE_integer("step", None, "Only evaluate and export the checkpoint of this step.")
flags.DEFINE_bool("traceback", False, "Show the traceback of an input error.")
_CLUSTER = flags.DEFINE_enum(
    "cluster", None, ["slurm", "tpu"], "Cluster to read process id and coordinator from."
)
_COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of process 0.")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Number of processes in the job.")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "Index of this process, from 0.")
_PEER_DEADLINE_S = flags.DEFINE_float(
    "peer_deadline_s",
    PEER_DEADLINE_S,
    "Seconds after which a silent process counts as lost.",
    lower_bound=5,
)

INPUT_ERRORS = (ValueError, KeyError, AttributeError, TypeError, OSError, flags.Error)


def main(argv: Sequence[str]) -> None:
    """Check the configuration, workdir and files, then run the stages."""
    run_started = threading.Event()
    sys.excepthook = _print_exception
    try:
        with redact_output(), watch_stop_signals(run_started.is_set) as should_stop:
            config, workdir, job = _load_config_and_job(argv)
            from jaxrl.runtime.checkpoint import filter_orbax_logs
            from jaxrl.runtime.peers import join_job

            with filter_orbax_logs():
                peers = None
                try:
                    peers = job and join_job(job, deadline_s=_PEER_DEADLINE_S.value)
                except OSError as error:
                    _exit_with_error(error)
                with peers or contextlib.nullcontext():
                    any_should_stop = (
                        peers.make_global_should_stop(should_stop) if peers else should_stop
                    )
                    _build_and_run(config, workdir, any_should_stop, run_started.set)
    except SystemExit as end:
        # Look the module up: importing it here would load JAX in a run stopped before that.
        compilation = sys.modules.get("jaxrl.runtime.compilation")
        if end.code == EXIT_INTERRUPTED and compilation and compilation.is_compiling():
            # A normal exit would wait for the compilation.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(EXIT_INTERRUPTED)
        raise


def _print_exception(*raised: Any) -> None:
    """Print an uncaught exception and its causes, redacted."""
    sys.stderr.write(redact("".join(traceback.format_exception(*raised))))


def _load_config_and_job(argv: Sequence[str]) -> tuple[ConfigDict, Path, Job | None]:
    """Return the validated configuration, the workdir, and the multi-process job or None."""
    try:
        config, workdir = _load_config(argv)
        # Imported late, so that a misspelled key is reported at once, without loading JAX.
        from jaxrl.builders.validation import validate

        config = validate(config, needs_data=not _PLAN.value)
        # Otherwise JAX warns on hosts without accelerators.
        for name in ("absl", "jax._src.compilation_cache", "jax._src.xla_bridge", "httpx2"):
            logging.getLogger(name).setLevel(logging.WARNING)
        if _PLAN.value:
            from jaxrl.builders.hub import download_files

            config = download_files(config, for_plan=True)
            show_plan = import_optional(SHOW_PLAN)
            if show_plan is None:
                raise ValueError("--plan: jaxrl/extras/plan is missing; restore the folder.")
            fits = show_plan(
                config,
                num_devices=_PLAN_DEVICES.value,
                num_processes=_PLAN_PROCESSES.value,
                memory_gib=_PLAN_MEMORY.value,
                platform=_PLAN_PLATFORM.value,
                num_passages=_PLAN_PASSAGES.value,
                json_file=_PLAN_JSON.value,
            )
            sys.exit(0 if fits else 1)
        from jaxrl.runtime.job import find_job

        job = find_job(
            coordinator=_COORDINATOR.value,
            num_processes=_NUM_PROCESSES.value,
            process_id=_PROCESS_ID.value,
            cluster=_CLUSTER.value,
        )
    except INPUT_ERRORS as error:
        _exit_with_error(error)
    return config, workdir, job


def _build_and_run(
    config: ConfigDict,
    workdir: Path,
    should_stop: Callable[[], bool],
    on_progress: Callable[[], None],
) -> None:
    """Build the run and execute its stages. Exit the process on errors.

    Args:
        config: Validated configuration.
        workdir: Folder of the run; created if missing.
        should_stop: Function that returns True once the run must save and exit.
        on_progress: Function called as soon as the run may have progress worth saving.
    """
    from jaxrl.envs.base import OutageError
    from jaxrl.envs.images import UnreadableImageError
    from jaxrl.logs.display import Display
    from jaxrl.runtime import distributed
    from jaxrl.runtime.checkpoint import CheckpointError
    from jaxrl.runtime.preemption import Interrupted
    from jaxrl.runtime.watchdog import watchdog
    from jaxrl.training.collect import NotEnoughGroupsError
    from jaxrl.training.failures import AllEpisodesFailedError
    from jaxrl.training.usage import BudgetSpentError
    from jaxrl.training.watch import CollapseError
    from jaxrl.utils.callables import UserCodeError

    with contextlib.ExitStack() as stack:
        # Build. The user can fix these errors, so print one line instead of a stack trace.
        display = Display(is_enabled=distributed.is_main())
        stack.callback(display.stop)
        try:
            run_stages = prepare_run(
                config,
                workdir,
                display,
                stack,
                accept_changes=_ACCEPT.value,
                ignore_memory_plan=_IGNORE_MEMORY_PLAN.value,
                step=_STEP.value,
            )
        except INPUT_ERRORS as error:
            _exit_with_error(error)
        except OutageError as error:
            _exit_with_code(error, EXIT_UNAVAILABLE)
        # Run. Each outcome has its exit code.
        on_progress()
        stack.enter_context(watchdog(display, config.watch.stall_s, config.watch.deadline_s))
        try:
            run_stages(should_stop)
        except (Interrupted, BudgetSpentError) as error:
            sys.exit(EXIT_INTERRUPTED if isinstance(error, Interrupted) else EXIT_BUDGET_SPENT)
        except (AllEpisodesFailedError, OutageError) as error:
            _exit_with_code(error, EXIT_UNAVAILABLE)
        except CollapseError as error:
            _exit_with_code(error, EXIT_UNHEALTHY)
        except (
            CheckpointError,
            FolderMovedError,
            NotEnoughGroupsError,
            UserCodeError,
            UnreadableImageError,
        ) as error:
            _exit_with_error(error)
        except Exception as error:
            # Print one line for a full disk or a device out of memory.
            from jaxrl.builders.capacity import explain_out_of_memory
            from jaxrl.runtime.checkpoint import find_latest_complete_step

            saved = find_latest_complete_step(workdir / "checkpoints")
            status = "nothing is saved yet" if saved is None else f"step {saved} is saved"
            if (full := find_disk_full_error(error)) is not None:
                _exit_with_error(full, f"{status}; {REMEDIES[full.errno or 0]}", workdir)
            if (message := explain_out_of_memory(config, error)) is not None:
                _exit_with_error(MemoryError(f"{message}; {status}."))
            raise


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """Validated run with its components. See `run.run` for the fields.

    Calling the object runs the stages. If `step` is set, the call instead evaluates and exports the
    checkpoint of that step.
    """

    settings: Settings
    workdir: Path
    components: RunComponents
    display: Display
    contents: Mapping[str, str]
    record_start: Callable[[], None]
    step: int | None = None

    def __call__(self, should_stop: Callable[[], bool]) -> None:
        """Run the stages until they end or `should_stop` returns True; see `run.run` for errors."""
        from jaxrl.run import evaluate_step, run

        arguments = (self.settings, self.workdir, self.components, self.display, should_stop)
        try:
            if self.step is None:
                run(*arguments, self.contents, self.record_start)
            else:
                evaluate_step(*arguments, self.contents, self.step)
        except Exception:
            check_not_moved(self.workdir)  # a moved workdir may have caused the error
            raise


def prepare_run(
    config: ConfigDict,
    workdir: Path,
    display: Display,
    stack: contextlib.ExitStack,
    *,
    accept_changes: bool = False,
    ignore_memory_plan: bool = False,
    step: int | None = None,
) -> PreparedRun:
    """Check a run against its workdir, files and code, and build its components.

    Args:
        config: Validated configuration. Micro-batch sizes of 0 and Hub names are replaced in place.
        workdir: Folder of the run; created if missing.
        display: Progress display.
        stack: Exit stack that holds the lock of the workdir.
        accept_changes: True to resume even if data, rewards or the method have changed.
        ignore_memory_plan: True to start even if the plan needs more memory than a device has.
        step: Step of the checkpoint to evaluate and export, instead of running the stages.

    Raises:
        ValueError, KeyError, AttributeError, TypeError, OSError: The configuration, the workdir or
            a file is invalid. The message says how to fix it.
        OutageError: The search engine's server does not respond.
    """
    from jaxrl.builders.components import build, build_run_settings
    from jaxrl.builders.fingerprints import check_processes_agree, compute_fingerprints
    from jaxrl.builders.hub import download_files
    from jaxrl.builders.resolved import check_tracker_packages
    from jaxrl.runtime import distributed, resume
    from jaxrl.runtime.compilation_cache import use_compilation_cache
    from jaxrl.runtime.host_memory import enable_memory_trimming

    # Run cheap checks first, so that a run that cannot start writes and compiles nothing.
    record = resume.read_record(workdir, accept_changes=accept_changes)
    config = download_files(config, record.config if record else None)
    if step is not None:
        if config.stages != ("evaluate",) or config.policy.name != configuration.LOCAL_MODEL:
            raise ValueError(
                f"--step={step} evaluates and exports a checkpoint of the run's own model; set "
                "--config.stages=\"('evaluate',)\", and leave config.policy.name as it is."
            )
        resume.check_checkpoint_exists(workdir / "checkpoints", step)
    check_tracker_packages(config)
    contents = compute_fingerprints(config)
    check_processes_agree(config, workdir, contents)
    changes = _check_workdir(
        config.recorded_config, workdir, record, contents, accept_changes=accept_changes
    )
    notes: list[str] = []
    if record is not None:
        # With --step the run itself stays unchanged.
        prefix = (
            f"changed since checkpoint {record.step}" if step is None else "differs from the run"
        )
        notes += [*record.warnings, *(f"{prefix}: {change}" for change in changes)]
    halves_micro_rows = config.optimizer.micro_rows == 0  # replaced by the next line
    notes += _fit_memory(config, workdir, ignore_memory_plan=ignore_memory_plan)
    use_compilation_cache(config.compilation_cache, display.log)
    enable_memory_trimming()
    # Prompts may contain the time; all processes must render the same one.
    now = datetime.fromisoformat(
        distributed.broadcast(resume.read_prompt_time(workdir).isoformat())
    )
    components = build(
        config,
        display.show_activity,
        workdir=workdir,
        log=display.log,
        now=now,
        halves_micro_rows=halves_micro_rows,
    )
    if distributed.is_main():
        stack.enter_context(lock_folder(workdir))
    for line in (*notes, *components.notes):
        display.log(line)

    def record_start() -> None:
        if distributed.is_main():
            resume.record_start(workdir, record, changes, config.recorded_config, contents)

    return PreparedRun(
        settings=build_run_settings(config),
        workdir=workdir,
        components=components,
        display=display,
        contents=contents,
        record_start=record_start,
        step=step,
    )


def _exit_with_code(error: Exception, code: int) -> NoReturn:
    """Print an error and exit the process with a code."""
    from jaxrl.runtime import distributed

    if distributed.is_main():
        print(f"error: {_format_message(error)}", file=sys.stderr)
    sys.exit(code)


def _fit_memory(
    config: ConfigDict, workdir: Path, *, ignore_memory_plan: bool = False
) -> list[str]:
    """Set micro-batch sizes in the config so that the run fits the devices; return log messages.

    Raises:
        ValueError: The run does not fit, or it needs the memory plan and the `plan` extra is
            missing.
    """
    if config.policy.name != configuration.LOCAL_MODEL:
        return []
    fit = import_optional(FIT_MEMORY)
    if fit is None:
        from jaxrl.builders.capacity import MICRO_ROWS

        for stage in config.num_steps_by_stage:
            if not config[MICRO_ROWS[stage]]:
                raise ValueError(
                    f"config.{MICRO_ROWS[stage]} is 0, which leaves it to the memory plan, but "
                    "jaxrl/extras/plan is missing; set it to a number of rows."
                )
        return ["no plan of memory: jaxrl/extras/plan is missing"]
    notes: list[str] = fit(config, workdir, ignore_memory_plan=ignore_memory_plan)
    return notes


FIT_MEMORY = "jaxrl.extras.plan.fitting:fit_memory"
"""Function that chooses micro-batch sizes, and rejects a run that does not fit in memory."""

SHOW_PLAN = "jaxrl.extras.plan.command:show_plan"
"""Function that implements `--plan`."""


def _check_workdir(
    config: ConfigDict,
    workdir: Path,
    record: RunRecord | None,
    contents: Mapping[str, str],
    *,
    accept_changes: bool,
) -> list[ConfigChange]:
    """Check that exports overwrite no source model, and that the workdir's run can resume.

    Returns:
        Changes of the configuration and the files since the run's record.
    """
    from jaxrl.builders.resolved import find_fixed_keys
    from jaxrl.runtime import resume

    for key, entry in configuration.KEYS.items():
        export_path = workdir / entry.written_to
        if entry.written_to and export_path.resolve() == Path(config[key]).resolve():
            raise ValueError(
                f"config.{key}={config[key]!r} is where --workdir={workdir} exports to; "
                "set --workdir to another folder."
            )
    if record is None:
        return []
    values = configuration.flatten_config(config)
    resume.check_fixed_keys(workdir, record, values, find_fixed_keys(config, record.config))
    changes = resume.find_changes(record, values, contents)
    if not accept_changes:
        resume.check_changes(workdir, record, changes)
    return changes


_SETTING = re.compile(r"--?(no)?config\.")


def parse_flags(argv: Sequence[str]) -> list[str]:
    """Parse the flags; return the other arguments, with `--config.key=value` settings last."""
    # Log to the current sys.stderr, which redacts secrets and prints above the live display.
    flags.FLAGS.set_default("logtostderr", True)
    settings = [argument for argument in argv if _SETTING.match(argument)]
    try:
        others = flags.FLAGS([argument for argument in argv if argument not in settings])
    except flags.Error as error:
        _exit_with_error(error)
    return [*others, *settings]


def _load_config(argv: Sequence[str]) -> tuple[ConfigDict, Path]:
    """Return the configuration with all overrides applied, and the workdir."""
    if _CONFIG.value is None:
        raise ValueError(
            "--config is missing; name a configuration, such as --config=configs/quickstart.py."
        )
    if _WORKDIR.value is None and not _PLAN.value:
        raise ValueError(
            "--workdir is missing; name the folder of the run, such as --workdir=runs/quickstart."
        )
    workdir = Path(_WORKDIR.value or "")
    for folder in (workdir, *workdir.parents):
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(f"--workdir={workdir}: {folder} is a file; name a folder.")
    keys = parse_overrides(argv[1:])
    # The config file and dotted names may import user modules from the config's folder.
    sys.path.append(str(Path(_CONFIG.value.partition(":")[0]).absolute().parent))
    config = load_config_file(_CONFIG.value)
    if _VALUES.value is not None:
        load_values(config, _VALUES.value)
    config.update_from_flattened_dict(keys)
    return config, workdir


def _exit_with_error(error: Exception, remedy: str = "", path: Path | None = None) -> NoReturn:
    """Exit with a one-line message about an input or system error.

    Args:
        error: Error to report.
        remedy: Remedy for a system error; overrides `REMEDIES`.
        path: Path to report for a system error that names no file.
    """
    if {"-traceback", "--traceback"} & set(sys.argv):
        raise error
    full = find_disk_full_error(error)
    if full is not None and full.filename:  # otherwise `error` says more
        error = full
    sys.exit(f"error: {_format_message(error, remedy, path)}")


def _format_message(error: Exception, remedy: str = "", path: Path | None = None) -> str:
    """Format an error in one line."""
    message = format_os_error(error, remedy, path) if isinstance(error, OSError) else None
    return escape_control_chars(" ".join((message or str(error)).split()))


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)

"""Progress display on the terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping

from rich.columns import Columns
from rich.console import RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.spinner import Spinner
from rich.table import Column

from jaxrl.logs.console import make_console
from jaxrl.utils.text import escape_control_chars


class _StageProgress(Progress):
    """Progress bar of a stage, with the last step's metrics in columns below it."""

    numbers: tuple[str, ...] = ()

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the bar and the metrics. On a narrow terminal, lines wrap between metrics."""
        yield from super().get_renderables()
        yield Columns(self.numbers, padding=(0, 2))


class Display:
    """Progress display: a live line on a terminal, otherwise a periodic log line."""

    def __init__(
        self, *, interval_s: float = 5.0, activity_interval_s: float = 30.0, is_enabled: bool = True
    ):
        """Create the consoles for output and warnings.

        Args:
            interval_s: Seconds between step lines if there is no terminal.
            activity_interval_s: Seconds without output after which a status message is printed.
            is_enabled: False to print nothing.
        """
        self.console = make_console(highlight=False, quiet=not is_enabled)
        error_console = make_console(highlight=False, quiet=not is_enabled, stderr=True)
        # If a terminal shows both streams, only the live line's console can print above it.
        self._is_shared = self.console.is_terminal and error_console.is_terminal
        self._warnings = self.console if self._is_shared else error_console
        self._interval_s, self._activity_interval_s = interval_s, activity_interval_s
        self._last = -math.inf
        self._last_line_at = time.monotonic()  # time of the last line of any kind
        self._spinner = Spinner("dots", style="status.spinner")
        self._status: Live | None = None  # the live line when no stage is running
        self._first: tuple[int, float] | None = None  # a stage's first step and its end time
        self._progress: _StageProgress | None = None
        self.last_progress_at, self.last_activity = time.monotonic(), ""

    def _record_progress(self, text: str) -> None:
        """Record progress for `runtime.watchdog`."""
        self.last_progress_at, self.last_activity = time.monotonic(), text

    def log(self, text: str) -> None:
        """Print a line above the live line. A line that starts with `warning:` goes to stderr.

        Control characters are escaped, so untrusted text cannot control the terminal.
        """
        self._end_activity()
        self._record_progress(text)
        self._last_line_at = time.monotonic()
        console = self._warnings if text.startswith("warning:") else self.console
        console.print(escape_control_chars(text), markup=False, emoji=False, soft_wrap=True)

    def start(self, stage: str, first_step: int, num_steps: int, *, every_steps: int = 0) -> None:
        """Start the progress display of a stage.

        Args:
            stage: Name of the stage.
            first_step: Number of steps already done.
            num_steps: Number of steps of the stage.
            every_steps: Steps between step lines if there is no terminal; 0 to use `interval_s`.
        """
        self._end_activity()
        self._stage, self._num_steps, self._every_steps = stage, num_steps, every_steps
        self._first, self._last = None, -math.inf
        if self.console.is_terminal and not self.console.quiet:
            self._progress = _StageProgress(
                TextColumn("{task.description} {task.completed}/{task.total}"),
                BarColumn(bar_width=min(40, self.console.width // 4)),
                TimeRemainingColumn(compact=True),
                TextColumn(
                    "{task.fields[activity]}", markup=False, table_column=Column(no_wrap=False)
                ),
                console=self.console,
                redirect_stderr=self._is_shared,
                speed_estimate_period=3600,  # the default, 30 s, is too short for one step
            )
            self._progress.start()
            self._bar = self._progress.add_task(
                stage, total=num_steps, completed=first_step, activity=""
            )

    def show_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a step's metrics in the live line, or log them if a step line is due."""
        self._record_progress(f"{self._stage} {step}/{self._num_steps}")
        # Three significant digits, or an integer with thousands separators.
        shown = {k: f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}" for k, x in metrics.items()}
        texts = tuple(f"{name} {value}" for name, value in shown.items())
        if self._progress is not None:
            self._progress.numbers = texts
            self._progress.update(self._bar, completed=step, activity="")
            return
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)  # measure speed from here, since the first step compiles
        is_due = now - self._last >= self._interval_s
        if self._every_steps:
            is_due = step % self._every_steps == 0
        if not is_due and step < self._num_steps:
            return
        self._last = now
        first_step, started = self._first
        eta = "--:--"
        if step > first_step:
            eta_s = (now - started) / (step - first_step) * (self._num_steps - step)
            minutes, seconds = divmod(round(eta_s), 60)
            hours, minutes = divmod(minutes, 60)
            eta = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
        self.log(f"{self._stage} {step}/{self._num_steps}  {'  '.join(texts)}  {eta} left")

    def show_activity(self, text: str) -> None:
        """Show a status message during a step or before the first step."""
        text = escape_control_chars(text)
        self._record_progress(text)
        if self._progress is not None:
            self._progress.update(self._bar, activity=text)
        elif self.console.is_terminal and not self.console.quiet:
            self._spinner.update(text=escape(text))
            if self._status is None:
                self._status = Live(
                    self._spinner,
                    console=self.console,
                    redirect_stderr=self._is_shared,
                    refresh_per_second=12.5,
                    transient=True,
                )
                self._status.start()
        elif time.monotonic() - self._last_line_at >= self._activity_interval_s:
            self.log(text)

    def make_progress_callback(self, label: str) -> Callable[[int, int], None]:
        """Return a callback `(done, total)` that shows progress as a status message."""
        return lambda done, total: self.show_activity(f"{label} {done:,}/{total:,}")

    def _end_activity(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def stop(self) -> None:
        """Stop the progress display of the stage."""
        self._end_activity()
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

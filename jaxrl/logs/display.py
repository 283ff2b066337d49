"""Progress on the terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.spinner import Spinner
from rich.table import Column

from jaxrl.utils.text import printable


class Display:
    """Progress on the terminal: a live line where there is one, else a line now and then."""

    def __init__(
        self, *, every_s: float = 5.0, activity_every_s: float = 30.0, is_shown: bool = True
    ):
        """Open the terminal.

        Args:
            every_s: Seconds between two lines of steps without a terminal.
            activity_every_s: Seconds of silence before a line about an activity.
            is_shown: False to print nothing.
        """
        self.console = Console(highlight=False, quiet=not is_shown)
        errors = Console(highlight=False, quiet=not is_shown, stderr=True)
        # On a terminal that shows both, only the console of the live line can print above it.
        self._is_shared = self.console.is_terminal and errors.is_terminal
        self._warnings = self.console if self._is_shared else errors
        self._every_s, self._activity_every_s = every_s, activity_every_s
        self._last = -math.inf
        self._spoken = time.monotonic()  # the last line of any kind
        self._spinner = Spinner("dots", style="status.spinner")
        self._status: Live | None = None  # the live line outside of a stage
        self._first: tuple[int, float] | None = None  # a stage's first step and when it ended
        self._progress: Progress | None = None
        self.moved_at, self.doing = time.monotonic(), ""

    def _move(self, text: str) -> None:
        """Note progress for `runtime.watchdog`."""
        self.moved_at, self.doing = time.monotonic(), text

    def log(self, text: str) -> None:
        """Print a line; one that begins with `warning:` goes to stderr.

        It stays above the live line. Foreign text in it cannot control the terminal.
        """
        self._end_activity()
        self._move(text)
        self._spoken = time.monotonic()
        console = self._warnings if text.startswith("warning:") else self.console
        console.print(printable(text), markup=False, emoji=False, soft_wrap=True)

    def start(self, stage: str, first_step: int, num_steps: int) -> None:
        """Begin a stage of `num_steps` steps, of which `first_step` are done."""
        self._end_activity()
        self._stage, self._num_steps = stage, num_steps
        self._first, self._last = None, -math.inf
        if self.console.is_terminal and not self.console.quiet:
            self._progress = Progress(
                TextColumn("{task.description} {task.completed}/{task.total}"),
                *([BarColumn()] if self.console.width >= 140 else []),
                # Where there is little room, the numbers go on below rather than the time be cut.
                TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=False)),
                TextColumn(
                    "{task.fields[activity]}", markup=False, table_column=Column(no_wrap=False)
                ),
                TimeRemainingColumn(compact=True),
                console=self.console,
                redirect_stderr=self._is_shared,
                speed_estimate_period=3600,  # of half a minute by default, too short for one step
            )
            self._progress.start()
            self._bar = self._progress.add_task(
                stage, total=num_steps, completed=first_step, numbers="", activity=""
            )

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        """Show the numbers after a step of the stage."""
        self._move(f"{self._stage} {step}/{self._num_steps}")
        # Three digits, or a whole number with its thousands apart.
        shown = {k: f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}" for k, x in numbers.items()}
        text = "  ".join(f"{name} {value}" for name, value in shown.items())
        if self._progress is not None:
            self._progress.update(self._bar, completed=step, numbers=text, activity="")
            return
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)  # speeds count from here on: the first step compiles
        if now - self._last < self._every_s and step < self._num_steps:
            return
        self._last = now
        first_step, started = self._first
        left = "--:--"
        if step > first_step:
            left_s = (now - started) / (step - first_step) * (self._num_steps - step)
            minutes, seconds = divmod(round(left_s), 60)
            hours, minutes = divmod(minutes, 60)
            left = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
        self.log(f"{self._stage} {step}/{self._num_steps}  {text}  {left} left")

    def activity(self, text: str) -> None:
        """Show an activity in a step or before the first one."""
        text = printable(text)
        self._move(text)
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
        elif time.monotonic() - self._spoken >= self._activity_every_s:
            self.log(text)

    def counter(self, what: str) -> Callable[[int, int], None]:
        """Return a callback that shows an activity's progress, done of total."""
        return lambda done, total: self.activity(f"{what} {done:,}/{total:,}")

    def _end_activity(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def stop(self) -> None:
        """End the stage."""
        self._end_activity()
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

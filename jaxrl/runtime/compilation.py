"""Compiled functions for a known set of shapes, shared by equal keys and interruptible."""

from __future__ import annotations

import atexit
import queue
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import jax
from cachetools import LRUCache

from jaxrl.runtime.preemption import Interrupted

MULTIPLIES_BFLOAT16 = jax.__version_info__ >= (0, 12)
"""True if a CPU multiplies bfloat16 directly, except for a single row of activations.

JAX 0.10.2 multiplies float32 copies, and 0.12.0.1 does for one row. Copies of weights that a loop
reads are made before it and stay until its end.
"""

LOOK_S = 0.1
"""Seconds between two checks, during a compilation, whether it is to stop."""


_should_stop: ContextVar[Callable[[], bool]] = ContextVar("should_stop", default=lambda: False)
_threads: list[threading.Thread] = []


@contextmanager
def stopped_by(should_stop: Callable[[], bool]) -> Iterator[None]:
    """Let compilations of this thread raise `Interrupted` once `should_stop` returns True.

    Not in a job of several processes: the others would wait in the next program for this one.
    """
    token = _should_stop.set(lambda: jax.process_count() == 1 and should_stop())
    try:
        yield
    finally:
        _should_stop.reset(token)


def compile_all(
    compiling: Sequence[Callable[[], None]], done: Callable[[int], None] = lambda _: None
) -> None:
    """Call functions that compile, in parallel; `done` receives how many have ended.

    They run in threads, since XLA blocks signals in the thread that it compiles in. An interrupted
    one continues, and its program may be called later.

    Raises:
        Interrupted: See `stopped_by`.
    """
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run(compile_it: Callable[[], None]) -> None:
        try:
            compile_it()
        except BaseException as error:  # raised again in the waiting thread
            ended.put(error)
        else:
            ended.put(None)

    _threads[:] = [thread for thread in _threads if thread.is_alive()]
    for compile_it in compiling:
        # Daemons, for which the interpreter does not wait before `is_under_way` was asked.
        _threads.append(threading.Thread(target=run, args=(compile_it,), daemon=True))
        _threads[-1].start()
    count = 0
    while count < len(compiling):
        try:
            error = ended.get(timeout=LOOK_S)
        except queue.Empty:
            if _should_stop.get()():
                raise Interrupted("a compilation was asked to stop") from None
            continue
        if error is not None:
            raise error
        count += 1
        done(count)


def is_under_way() -> bool:
    """Return True while something compiles, for which the end of the process would wait."""
    return any(thread.is_alive() for thread in _threads)


@atexit.register
def _wait() -> None:
    """Let compilations end: JAX frees at its own exit what they use."""
    for thread in _threads:
        thread.join()


_kept: LRUCache[Hashable, Any] = LRUCache(maxsize=128)  # a run has some twenty
_code: dict[tuple[str, str], Any] = {}  # contents of jaxrl's modules at the last check
_lock = threading.RLock()  # for both; `make` in `kept` may call `kept`

Made = TypeVar("Made")


def jitted(
    function: Callable[..., Any], *, name: str, key: Hashable = None, **settings: Any
) -> Any:
    """Return `jax.jit` of a function, or what an earlier call with an equal key returned.

    A notebook that trains twice then does not trace and compile its programs again. Each run calls
    `forget_if_edited` first.

    Args:
        function: Function without arrays in its closure, as it is kept.
        name: Name of the program, which a profile shows.
        key: Key of what the function computes, together with the name. None, or a key without a
            hash, equals nothing.
        settings: Settings of `jax.jit`.
    """

    def called(*args: Any, **options: Any) -> Any:
        return function(*args, **options)

    called.__name__ = name
    return kept(partial(jax.jit, called, **settings), name=name, key=key)


def kept(make: Callable[[], Made], *, name: str, key: Hashable) -> Made:
    """Make something, or return what was made by this name for an equal key; see `jitted`."""
    try:
        hash(key)
    except TypeError:
        key = None
    if key is None:
        return make()
    with _lock:
        if (name, key) not in _kept:
            _kept[name, key] = make()
        found: Made = _kept[name, key]
        return found


def joined(*parts: Hashable) -> Hashable:
    """Return a key of several parts for `jitted`; None if one of them is None."""
    return None if any(part is None for part in parts) else parts


def forget_if_edited() -> None:
    """Drop all programs if code of jaxrl was reloaded or replaced since the last call."""
    modules = [(name, vars(m)) for name, m in [*sys.modules.items()] if name.startswith("jaxrl.")]
    code = {(name, key): v for name, space in modules for key, v in [*space.items()]}
    with _lock:
        # Modules that were first loaded since the last call are no edits.
        if any(code.get(place) is not value for place, value in _code.items()):
            _kept.clear()
        _code.clear()
        _code.update(code)


class CompiledFunction:
    """A function with the variants it may be compiled for, each once.

    An unexpected shape costs seconds to minutes on every new batch, so it is an error here. The
    caller names the variant of each call. `jax.jit` would trace again whenever its tracing context
    changes, as the first import of `jax.experimental.pallas` does since JAX 0.12.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str,
        variants: Iterable[Hashable] = ((),),
        donate_argnums: tuple[int, ...] = (),
        static_argnums: tuple[int, ...] = (),
        key: Hashable = None,
    ):
        """See `jitted` for `name` and `key`."""
        self.name = name
        self.variants = frozenset(variants)
        self._programs: dict[Hashable, Callable[..., Any]] = {}
        self.function = function
        self._static_argnums = static_argnums
        self._jitted = jitted(
            function,
            name=name,
            key=key,
            donate_argnums=donate_argnums,
            static_argnums=static_argnums,
        )

    @property
    def num_programs(self) -> int:
        """Number of variants compiled so far."""
        return len(self._programs)

    def __call__(self, *args: Any, variant: Hashable = ()) -> Any:
        """Call the function.

        Raises:
            RuntimeError: `variant` is unknown, or was compiled for other shapes, dtypes or
                shardings of the arguments.
        """
        self._check(variant)
        if variant not in self._programs:
            compile_all([self.ahead(*args, variant=variant)])
        try:
            return self._programs[variant](
                *(x for i, x in enumerate(args) if i not in self._static_argnums)
            )
        except (TypeError, ValueError) as error:
            raise RuntimeError(
                f"{self.name} was compiled for other arguments of the variant {variant}: {error} "
                "This is a bug in jaxrl."
            ) from error

    def ahead(self, *args: Any, variant: Hashable = ()) -> Callable[[], None]:
        """Trace the function for abstract arguments; the result compiles it, in any thread."""
        self._check(variant)
        if variant in self._programs:
            return lambda: None
        lowered = self._jitted.lower(*args)

        def compile_it() -> None:
            self._programs[variant] = lowered.compile()

        return compile_it

    def _check(self, variant: Hashable) -> None:
        if variant not in self.variants:
            raise RuntimeError(
                f"{self.name} was called for the shapes {variant}, outside its set "
                f"{sorted(self.variants, key=repr)}. This is a bug in jaxrl."
            )

    def lower(self, *args: Any) -> Any:
        """Lower the function for these (possibly abstract) arguments, for inspection."""
        return jax.jit(self.function, static_argnums=self._static_argnums).lower(*args)

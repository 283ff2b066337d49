"""Compiled functions whose shapes belong to a set known beforehand."""

from __future__ import annotations

import atexit
import operator
import queue
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any, TypeVar

import jax
from cachetools import LRUCache

from jaxrl.runtime.preemption import Interrupted

MULTIPLIES_BFLOAT16 = jax.__version_info__ >= (0, 12)
"""True where a CPU multiplies bfloat16 as it is, except for a single row of activations.

With JAX 0.10.2 it multiplies float32 copies, and with 0.12.0.1 where there is one row. Of weights
that a loop reads these copies are made before it, and all of them lie there until its end.
"""

LOOK_S = 0.1
"""Seconds between two looks, during a compilation, for whether it is still wanted."""


class _Asked(threading.local):
    """Asked by those within whom a thread's compilations are, the innermost last."""

    def __init__(self) -> None:
        self.all: list[Callable[[], bool]] = []


_asked = _Asked()
_threads: list[threading.Thread] = []


@contextmanager
def stopped_by(should_stop: Callable[[], bool]) -> Iterator[None]:
    """Compilations within raise `Interrupted` once `should_stop` says so.

    For code of one process that leaves all as it was when it is interrupted. In a job the others
    would wait for this process in the next program that all of them run.
    """
    _asked.all.append(lambda: jax.process_count() == 1 and should_stop())
    try:
        yield
    finally:
        _asked.all.pop()


def compile_all(
    compiling: Sequence[Callable[[], None]], done: Callable[[int], None] = lambda _: None
) -> None:
    """Calls functions that compile, side by side; `done` is told how many have ended.

    They run in threads, since XLA gives the thread that it compiles in no turn for a signal. One
    that is interrupted goes on, and its program may be called later.

    Raises:
        Interrupted: see `stopped_by`.
    """
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run(compile_it: Callable[[], None]) -> None:
        try:
            compile_it()
        except BaseException as error:  # raised again where it is waited for
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
            if _asked.all and _asked.all[-1]():
                raise Interrupted("a compilation was asked to stop") from None
            continue
        if error is not None:
            raise error
        count += 1
        done(count)


def is_under_way() -> bool:
    """True while something compiles, for which the end of the process would wait."""
    return any(thread.is_alive() for thread in _threads)


@atexit.register
def _wait() -> None:
    """Lets compilations end: JAX frees at its own exit what they use."""
    for thread in _threads:
        thread.join()


_kept: LRUCache[Hashable, Any] = LRUCache(maxsize=128)  # a run has some twenty
_code: dict[str, list[Any]] = {}  # of jaxrl, by module and class, as it was at the last look
_lock = threading.RLock()  # of both: runs begin in threads, and what is made asks in turn

Made = TypeVar("Made")


def jitted(
    function: Callable[..., Any], *, name: str, key: Hashable = None, **settings: Any
) -> Any:
    """`jax.jit` of a function, or what an earlier call with an equal key returned.

    JAX keeps what it has traced and compiled with the result. So a process that makes an engine or
    an update anew, as a notebook that trains twice, does not trace and compile its programs again.
    A run that begins calls `forget_if_edited` first.

    Args:
        function: is kept, so it may hold no arrays.
        name: of the program, which a profile shows.
        key: of what the function computes: whoever has an equal one with this name computes the
            same, and gives the same `settings`. Nothing equals None, nor what has no hash.
        settings: of `jax.jit`.
    """

    def called(*args: Any, **options: Any) -> Any:
        return function(*args, **options)

    called.__name__ = name
    return kept(partial(jax.jit, called, **settings), name=name, key=key)


def kept(make: Callable[[], Made], *, name: str, key: Hashable) -> Made:
    """Makes something, or finds what was made by this name for an equal key; see `jitted`."""
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
    """A key of several parts, for `jitted`; None where one of them is."""
    return None if any(part is None for part in parts) else parts


def forget_if_edited() -> None:
    """Forgets all that was kept once code of jaxrl was loaded again or replaced in this process."""
    spaces: dict[str, Mapping[str, Any]] = {
        name: vars(one) for name, one in [*sys.modules.items()] if name.startswith("jaxrl.")
    }
    for module, space in [*spaces.items()]:
        for name, value in [*space.items()]:
            if isinstance(value, type) and value.__module__ == module:
                spaces[f"{module}:{name}"] = vars(value)
    code = {
        place: [v.__code__ if isinstance(v, FunctionType) else v for v in [*space.values()]]
        for place, space in spaces.items()
    }
    with _lock:
        # What was loaded since then stands behind the names that there were.
        if not all(
            all(map(operator.is_, before, code.get(at, [None]))) for at, before in _code.items()
        ):
            _kept.clear()
        _code.clear()
        _code.update(code)


class CompiledFunction:
    """A function with the shapes it may be compiled for, and a count of its compilations.

    A shape that slips in unnoticed costs seconds to minutes on every new batch, so it is an error
    here. The caller names the variant of each call; every variant is compiled once, and later calls
    run that program. `jax.jit` would trace it again whenever anything changes that JAX takes for
    its tracing context, as the first import of `jax.experimental.pallas` does since JAX 0.12.
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
        """Variants that were compiled so far, or found."""
        return len(self._programs)

    def __call__(self, *args: Any, variant: Hashable = ()) -> Any:
        """Calls the function.

        Raises:
            RuntimeError: `variant` is outside the set, or was compiled before for other shapes,
                dtypes or places of the arguments.
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
        """Traces the function for abstract arguments; what is returned compiles it, in any thread.

        Later calls of the variant run this program. A variant that was compiled before is left.
        """
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
        """The function lowered for these (possibly abstract) arguments, for inspection."""
        return jax.jit(self.function, static_argnums=self._static_argnums).lower(*args)

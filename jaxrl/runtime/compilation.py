"""Compiled functions whose shapes belong to a set known beforehand."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from cachetools import LRUCache

from jaxrl.runtime.stopping import Interrupted

MULTIPLIES_BFLOAT16 = jax.__version_info__ >= (0, 12)
"""True where a CPU multiplies bfloat16 as it is, except for a single row of activations.

With JAX 0.10.2 it multiplies float32 copies, and with 0.12.0.1 where there is one row. Of weights
that a loop reads these copies are made before it, and all of them lie there until its end.
"""

LOOK_S = 0.1
"""Seconds between two looks, during a compilation, for whether it is still wanted."""


_asked: list[Callable[[], bool]] = []  # by those within whom compilations are, innermost last
_threads: list[threading.Thread] = []


@contextmanager
def stopped_by(should_stop: Callable[[], bool]) -> Iterator[None]:
    """Compilations within raise `Interrupted` once `should_stop` says so.

    For code of one process that leaves all as it was when it is interrupted. In a job the others
    would wait for this process in the next program that all of them run.
    """
    _asked.append(lambda: jax.process_count() == 1 and should_stop())
    try:
        yield
    finally:
        _asked.pop()


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
            if _asked and _asked[-1]():
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


_jitted: LRUCache[Hashable, Any] = LRUCache(maxsize=128)


def jitted(
    function: Callable[..., Any], *, name: str, same: Hashable = None, **settings: Any
) -> Any:
    """`jax.jit` of a function, or of an earlier one that does the same.

    JAX keeps what it traced and compiled with what this returns, so who makes an object anew in one
    process, as a notebook that trains twice, does not compile its functions again.

    Args:
        function: it may hold no arrays, since it is kept.
        name: of the program, which a profile shows.
        same: equal for functions of that name that compute the same. For None, and for what has no
            hash, as an architecture of one's own may have none, there are no others.
        settings: of `jax.jit`, the same wherever `same` is.
    """

    def called(*args: Any, **options: Any) -> Any:
        return function(*args, **options)

    called.__name__ = name
    made = jax.jit(called, **settings)
    try:
        return made if same is None else _jitted.setdefault((name, same), made)
    except TypeError:
        return made


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
        same: Hashable = None,
    ):
        """See `jitted` for `name` and `same`."""
        self.name = name
        self.variants = frozenset(variants)
        self._programs: dict[Hashable, Callable[..., Any]] = {}
        self.function = function
        self._static_argnums = static_argnums
        self._jitted = jitted(
            function,
            name=name,
            same=same,
            donate_argnums=donate_argnums,
            static_argnums=static_argnums,
        )

    @property
    def num_traces(self) -> int:
        """Variants that were compiled so far, here or where the same was done before."""
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

"""Functions with fixed sets of compiled shapes, a program cache, and interruptible compilation."""

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

CPU_HAS_BFLOAT16_MATMUL = jax.__version_info__ >= (0, 12)
"""True if a CPU multiplies bfloat16 directly, except for a single row of activations.

JAX 0.10.2 always converts to float32 first, 0.12.0.1 only for a single row. For weights that a loop
reads, the float32 copies are made before the loop and stay in memory until it ends.
"""

POLL_INTERVAL_S = 0.1
"""Seconds between two checks for a stop request during a compilation."""


_should_stop: ContextVar[Callable[[], bool]] = ContextVar("should_stop", default=lambda: False)
_threads: list[threading.Thread] = []


@contextmanager
def interruptible(should_stop: Callable[[], bool]) -> Iterator[None]:
    """Make compilations in this thread raise `Interrupted` once `should_stop` returns True.

    This has no effect in a multi-process job, where the next program of the other processes would
    wait for the interrupted process.
    """
    token = _should_stop.set(lambda: jax.process_count() == 1 and should_stop())
    try:
        yield
    finally:
        _should_stop.reset(token)


def compile_all(
    compile_fns: Sequence[Callable[[], None]], on_progress: Callable[[int], None] = lambda _: None
) -> None:
    """Call `compile_fns` in parallel. `on_progress` receives the number of calls finished so far.

    The functions run in threads, because XLA blocks signals in the compiling thread. An interrupted
    compilation continues in its thread, and its program can be used later.

    Raises:
        Interrupted: See `interruptible`.
    """
    results: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run_compile_fn(compile_fn: Callable[[], None]) -> None:
        try:
            compile_fn()
        except BaseException as error:  # raised again in the waiting thread
            results.put(error)
        else:
            results.put(None)

    _threads[:] = [thread for thread in _threads if thread.is_alive()]
    for compile_fn in compile_fns:
        # Daemon threads: the interpreter must not wait for them before `is_compiling` is checked.
        _threads.append(threading.Thread(target=run_compile_fn, args=(compile_fn,), daemon=True))
        _threads[-1].start()
    count = 0
    while count < len(compile_fns):
        try:
            error = results.get(timeout=POLL_INTERVAL_S)
        except queue.Empty:
            if _should_stop.get()():
                raise Interrupted("a compilation was asked to stop") from None
            continue
        if error is not None:
            raise error
        count += 1
        on_progress(count)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error means that a program or its compilation ran out of device memory."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def is_compiling() -> bool:
    """Return True if a compilation is running. It would delay the exit of the process."""
    return any(thread.is_alive() for thread in _threads)


@atexit.register
def _wait_for_compilations() -> None:
    """Wait for compilations before JAX's exit handler frees their resources."""
    for thread in _threads:
        thread.join()


_cache: LRUCache[Hashable, Any] = LRUCache(maxsize=128)  # a run has about twenty entries
_module_code: dict[tuple[str, str], Any] = {}  # contents of jaxrl's modules at the last check
_lock = (
    threading.RLock()
)  # guards both; reentrant because `make` in `get_or_create` may call `get_or_create`

Result = TypeVar("Result")


def cached_jit(
    function: Callable[..., Any], *, name: str, key: Hashable = None, **settings: Any
) -> Any:
    """Return `jax.jit` of a function, or the result of an earlier call with an equal key.

    A notebook that trains twice therefore traces and compiles its programs only once. Each run
    calls `clear_cache_on_code_change` first.

    Args:
        function: Function without arrays in its closure, because it stays in memory.
        name: Name of the program in profiles.
        key: Key that identifies the computation, together with the name. Results for None and
            unhashable keys are not cached.
        settings: Settings of `jax.jit`.
    """

    def wrapper(*args: Any, **options: Any) -> Any:
        return function(*args, **options)

    wrapper.__name__ = name
    return get_or_create(partial(jax.jit, wrapper, **settings), name=name, key=key)


def get_or_create(make: Callable[[], Result], *, name: str, key: Hashable) -> Result:
    """Return the cached result for `name` and `key`, or cache the result of `make`."""
    try:
        hash(key)
    except TypeError:
        key = None
    if key is None:
        return make()
    with _lock:
        if (name, key) not in _cache:
            _cache[name, key] = make()
        result: Result = _cache[name, key]
        return result


def join_keys(*parts: Hashable) -> Hashable:
    """Combine parts into a key for `cached_jit`; return None if any part is None."""
    return None if any(part is None for part in parts) else parts


def clear_cache_on_code_change() -> None:
    """Clear the program cache if jaxrl's code was reloaded or replaced since the last call."""
    modules = [(name, vars(m)) for name, m in [*sys.modules.items()] if name.startswith("jaxrl.")]
    code = {(name, key): v for name, space in modules for key, v in [*space.items()]}
    with _lock:
        # A module that was first loaded since the last call is not an edit.
        if any(code.get(entry) is not value for entry, value in _module_code.items()):
            _cache.clear()
        _module_code.clear()
        _module_code.update(code)


class CompiledFunction:
    """Function with a fixed set of variants, each compiled once.

    An unexpected shape raises an error, because compiling it would take seconds to minutes. The
    caller names the variant of each call, because `jax.jit` would retrace whenever its tracing
    context changes. Since JAX 0.12, the first import of `jax.experimental.pallas` changes it.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str,
        variants: Iterable[Hashable] | None = ((),),
        donate_argnums: tuple[int, ...] = (),
        static_argnums: tuple[int, ...] = (),
        key: Hashable = None,
    ):
        """Wrap `function` for the given `variants`; see `cached_jit` for `name` and `key`.

        `variants=None` allows any variant, for callers that limit the number of shapes themselves.
        """
        self.name = name
        self.variants = None if variants is None else frozenset(variants)
        self._programs: dict[Hashable, Callable[..., Any]] = {}
        self.function = function
        self._static_argnums = static_argnums
        self._jitted = cached_jit(
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
        """Call the function, after compiling `variant` on first use.

        Raises:
            RuntimeError: `variant` is unknown.
            TypeError, ValueError: It was compiled for other shapes, dtypes or shardings.
        """
        self._check_variant(variant)
        if variant not in self._programs:
            compile_all([self.make_compile_fn(*args, variant=variant)])
        dynamic_args = [x for i, x in enumerate(args) if i not in self._static_argnums]
        return self._programs[variant](*dynamic_args)

    def make_compile_fn(self, *args: Any, variant: Hashable = ()) -> Callable[[], None]:
        """Trace the function for abstract arguments; return a function that compiles it.

        The result may be called from any thread.
        """
        self._check_variant(variant)
        if variant in self._programs:
            return lambda: None
        lowered = self._jitted.lower(*args)

        def compile_fn() -> None:
            self._programs[variant] = lowered.compile()

        return compile_fn

    def _check_variant(self, variant: Hashable) -> None:
        if self.variants is not None and variant not in self.variants:
            raise RuntimeError(
                f"{self.name} was called with the variant {variant}; expected one of "
                f"{sorted(self.variants, key=repr)}. This is a bug in jaxrl."
            )

    def lower(self, *args: Any) -> Any:
        """Lower the function for these (possibly abstract) arguments, for inspection."""
        return jax.jit(self.function, static_argnums=self._static_argnums).lower(*args)

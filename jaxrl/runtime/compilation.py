"""Compiled functions whose shapes belong to a set known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax


class CompiledFunction:
    """A function with the shapes it may be compiled for, and a count of its compilations.

    A shape that slips in unnoticed costs seconds to minutes on every new batch, so it is an error
    here. The caller names the variant of each call; every variant is compiled once, and later calls
    run that program. `jax.jit` would trace it again whenever anything changes that JAX takes for
    its tracing context, as the first import of `jax.experimental.pallas` does since JAX 0.12.

    Attributes:
        num_traces: compilations so far.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str,
        variants: Iterable[Hashable] = ((),),
        donate_argnums: tuple[int, ...] = (),
        static_argnums: tuple[int, ...] = (),
    ):
        self.name = name
        self.variants = frozenset(variants)
        self.num_traces = 0

        def traced(*args: Any) -> Any:
            result = function(*args)
            self.num_traces += 1
            return result

        self._programs: dict[Hashable, Callable[..., Any]] = {}
        self.function = function
        self._static_argnums = static_argnums
        self._jitted = jax.jit(traced, donate_argnums=donate_argnums, static_argnums=static_argnums)

    def __call__(self, *args: Any, variant: Hashable = ()) -> Any:
        """Calls the function.

        Raises:
            RuntimeError: `variant` is outside the set, or was compiled before for other shapes,
                dtypes or places of the arguments.
        """
        self._check(variant)
        if variant not in self._programs:
            self.ahead(*args, variant=variant)()
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

import importlib
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.runtime.compilation import (
    CompiledFunction,
    clear_cache_if_edited,
    compile_all,
    interruptible,
    is_compiling,
)
from jaxrl.runtime.preemption import Interrupted


def double(x):
    return x * 2


def test_each_variant_is_compiled_once():
    compiled = CompiledFunction(double, name="double", variants=[2, 3])
    for size in (2, 3, 2, 3, 2):
        np.testing.assert_array_equal(compiled(jnp.ones(size), variant=size), np.full(size, 2.0))
        assert compiled.num_programs <= 2
    assert compiled.num_programs == 2


def test_a_variant_outside_the_set_is_an_error():
    compiled = CompiledFunction(double, name="double", variants=[2, 3])
    with pytest.raises(RuntimeError, match=r"the variant 4; expected one of \[2, 3\]"):
        compiled(jnp.ones(4), variant=4)
    with pytest.raises(RuntimeError, match=r"the shapes \(\), outside"):
        compiled(jnp.ones(2))
    assert compiled.num_programs == 0


@pytest.mark.parametrize("other", [jnp.ones(3), jnp.ones(2, jnp.int32), jnp.ones((2, 1))])
def test_arguments_that_change_within_a_variant_are_an_error(other):
    compiled = CompiledFunction(double, name="double", variants=["a", "b"])
    compiled(jnp.ones(2), variant="a")
    with pytest.raises(RuntimeError, match="compiled for other arguments of the variant a"):
        compiled(other, variant="a")
    # The shape it was compiled for still works.
    np.testing.assert_array_equal(compiled(jnp.ones(2), variant="a"), [2.0, 2.0])


def test_what_jax_takes_for_its_context_may_change_between_calls():
    """It does when a module with settings of its own is imported: JAX 0.12's Pallas is one."""
    compiled = CompiledFunction(double, name="double")
    compiled(jnp.ones(2))
    with jax.default_matmul_precision("float32"):
        np.testing.assert_array_equal(compiled(jnp.ones(2)), [2.0, 2.0])
    assert compiled.num_programs == 1


def test_what_does_the_same_is_traced_once():
    traced = []

    def times(factor):
        def function(x):
            traced.append(factor)
            return x * factor

        return function

    def times_in(factor, key):
        compiled = CompiledFunction(times(factor), name="times", key=key)
        assert compiled.num_programs == 0
        result = compiled(jnp.ones(2))
        assert compiled.num_programs == 1
        return result.tolist()

    assert times_in(2, key=("times", 2)) == times_in(2, key=("times", 2)) == [2.0, 2.0]
    assert traced == [2]
    assert times_in(3, key=("times", 3)) == [3.0, 3.0]
    # Nothing is the same as what has no hash, and as what says nothing.
    assert times_in(4, key=["times", 2]) == times_in(4, key=None) == [4.0, 4.0]
    assert traced == [2, 3, 4, 4]


def test_what_was_kept_is_forgotten_where_code_of_jaxrl_is_replaced(monkeypatch):
    """By a notebook that loads an edited module again, say, or puts a function in its place."""
    traced = []

    def function(x):
        traced.append(1)
        return x

    def play():
        clear_cache_if_edited()
        CompiledFunction(function, name="function", key="edited")(jnp.ones(2))
        return len(traced)

    assert (play(), play()) == (1, 1)
    monkeypatch.setattr("jaxrl.runtime.preemption.EXIT_INTERRUPTED", 99)
    assert (play(), play()) == (2, 2)
    importlib.reload(importlib.import_module("jaxrl.objectives.turns"))
    assert (play(), play()) == (3, 3)
    importlib.import_module("jaxrl.objectives.segments")  # is no edit, loaded before or not
    assert play() == 3


def test_each_thread_asks_what_its_own_compilations_are_within():
    compiling = [lambda: time.sleep(0.3)]
    with interruptible(lambda: True), ThreadPoolExecutor(1) as pool:
        pool.submit(compile_all, compiling).result()  # another run's
        with pytest.raises(Interrupted):
            compile_all(compiling)


def test_compilations_end_side_by_side_and_are_counted():
    both, counts = threading.Barrier(2, timeout=30), []
    compile_all([both.wait, both.wait], counts.append)  # one after the other they would wait
    assert counts == [1, 2]


def test_a_compilation_is_left_to_itself_when_it_is_asked_to_stop():
    asked, go_on = threading.Event(), threading.Event()
    double_it = CompiledFunction(double, name="double")
    compile_fn = double_it.make_compile_fn(jnp.ones(2))

    def slowly():
        asked.set()
        assert go_on.wait(timeout=30)
        compile_fn()

    with pytest.raises(Interrupted), interruptible(lambda: False), interruptible(asked.is_set):
        compile_all([slowly])
    assert is_compiling()
    go_on.set()
    while is_compiling():
        time.sleep(0.01)
    np.testing.assert_array_equal(double_it(jnp.ones(2)), [2.0, 2.0])
    assert double_it.num_programs == 1
    compile_all([asked.wait])  # nobody asks any more


DEEP = """
import os, jax, jax.numpy as jnp
from jaxrl.runtime.compilation import CompiledFunction, is_compiling, interruptible
from jaxrl.runtime.preemption import EXIT_INTERRUPTED, Interrupted, stop_on_signals

@jax.jit
def layer(x):
    return jnp.tanh(x @ x) + jax.nn.softmax(x)

def deep(x):
    for _ in range(5000):
        x = layer(x)
    return x

function = CompiledFunction(deep, name="deep")
ahead = function.ahead
def told(*args, **settings):
    compile_it = ahead(*args, **settings)
    print("ready", flush=True)
    return compile_it
function.ahead = told
with stop_on_signals() as should_stop:
    try:
        with interruptible(should_stop):
            function(jnp.ones((8, 8)))
    except Interrupted:
        print("under way", is_compiling(), flush=True)
        os._exit(EXIT_INTERRUPTED)
"""


def test_a_signal_ends_a_process_that_compiles():
    process = subprocess.Popen(
        [sys.executable, "-c", DEEP], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (75, "under way True\n")
    assert errors == "SIGTERM: stopping; send it again to exit immediately\n"

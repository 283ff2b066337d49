"""Compilation of each variant once, with shared programs and interrupts."""

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
    clear_cache_on_code_change,
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


def test_other_variants_and_arguments_are_errors():
    compiled = CompiledFunction(double, name="double", variants=["a", "b"])
    with pytest.raises(RuntimeError, match=r"the variant c; expected one of \['a', 'b'\]"):
        compiled(jnp.ones(4), variant="c")
    compiled(jnp.ones(2), variant="a")
    for changed in (jnp.ones(3), jnp.ones(2, jnp.int32)):
        with pytest.raises(TypeError, match="compiled"):
            compiled(changed, variant="a")
    np.testing.assert_array_equal(compiled(jnp.ones(2), variant="a"), [2.0, 2.0])


def test_jax_context_may_change_between_calls():
    """As when a module with its own settings is imported, such as Pallas of JAX 0.12."""
    compiled = CompiledFunction(double, name="double")
    compiled(jnp.ones(2))
    with jax.default_matmul_precision("float32"):
        np.testing.assert_array_equal(compiled(jnp.ones(2)), [2.0, 2.0])
    assert compiled.num_programs == 1


def test_functions_with_equal_keys_share_a_program_until_code_is_edited(monkeypatch):
    """A notebook may reload an edited module or replace a function."""
    traced = []

    def run(factor, key):
        def multiply(x):
            traced.append(factor)
            return x * factor

        clear_cache_on_code_change()
        compiled = CompiledFunction(multiply, name="multiply", key=key)
        assert compiled(jnp.ones(2)).tolist() == [factor, factor]
        assert compiled.num_programs == 1

    run(2, key=("multiply", 2))
    run(2, key=("multiply", 2))
    assert traced == [2]
    # No key, and a key that cannot be hashed, equal no other.
    for key in (("multiply", 3), None, None, ["multiply", 2]):
        run(3, key)
    assert traced == [2, 3, 3, 3, 3]
    monkeypatch.setattr("jaxrl.runtime.preemption.EXIT_INTERRUPTED", 99)
    run(2, key=("multiply", 2))
    importlib.reload(importlib.import_module("jaxrl.objectives.turns"))
    run(2, key=("multiply", 2))
    assert traced[5:] == [2, 2]
    importlib.import_module("jaxrl.objectives.segments")  # an import is no edit
    run(2, key=("multiply", 2))
    assert traced[5:] == [2, 2]


def test_an_interrupt_affects_only_the_compilations_of_its_thread():
    compile_fns = [lambda: time.sleep(0.3)]
    with interruptible(lambda: True), ThreadPoolExecutor(1) as pool:
        pool.submit(compile_all, compile_fns).result()
        with pytest.raises(Interrupted):
            compile_all(compile_fns)


def test_compilations_run_in_parallel_and_are_counted():
    barrier, counts = threading.Barrier(2, timeout=30), []
    compile_all([barrier.wait, barrier.wait], counts.append)
    assert counts == [1, 2]


def test_an_interrupted_compilation_finishes_in_the_background():
    started, finish = threading.Event(), threading.Event()
    double_it = CompiledFunction(double, name="double")
    compile_fn = double_it.make_compile_fn(jnp.ones(2))

    def compile_slowly():
        started.set()
        assert finish.wait(timeout=30)
        compile_fn()

    with pytest.raises(Interrupted), interruptible(lambda: False), interruptible(started.is_set):
        compile_all([compile_slowly])
    assert is_compiling()
    finish.set()
    while is_compiling():
        time.sleep(0.01)
    np.testing.assert_array_equal(double_it(jnp.ones(2)), [2.0, 2.0])
    assert double_it.num_programs == 1
    compile_all([started.wait])  # no longer interruptible


DEEP = """
import os, jax, jax.numpy as jnp
from jaxrl.runtime.compilation import CompiledFunction, is_compiling, interruptible
from jaxrl.runtime.preemption import EXIT_INTERRUPTED, Interrupted, watch_stop_signals

@jax.jit
def layer(x):
    return jnp.tanh(x @ x) + jax.nn.softmax(x)

def deep(x):
    for _ in range(2000):
        x = layer(x)
    return x

function = CompiledFunction(deep, name="deep")
make_compile_fn = function.make_compile_fn
def announce(*args, **settings):
    compile_fn = make_compile_fn(*args, **settings)
    print("ready", flush=True)
    return compile_fn
function.make_compile_fn = announce
with watch_stop_signals() as should_stop:
    try:
        with interruptible(should_stop):
            function(jnp.ones((8, 8)))
    except Interrupted:
        print("compiling", is_compiling(), flush=True)
        os._exit(EXIT_INTERRUPTED)
"""


def test_a_signal_ends_a_compiling_process():
    process = subprocess.Popen(
        [sys.executable, "-c", DEEP], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (75, "compiling True\n")
    assert errors == "SIGTERM: stopping; send it again to exit immediately\n"

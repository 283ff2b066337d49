"""Importing and calling jaxrl leaves the user's process as it was."""

import subprocess
import sys

# Every look-up on the network ends the process with a code of its own.
CODE = """
import logging, os, sys, time
def guard(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        print("network:", event, args, file=sys.stderr, flush=True)
        os._exit(99)
sys.addaudithook(guard)
for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_VERBOSITY", "TRANSFORMERS_NO_ADVISORY_WARNINGS"):
    os.environ.pop(name, None)
import jax  # which sets variables of its own
before = dict(os.environ)

import jaxrl.launch
from jaxrl.models.registry import read_architecture
from jaxrl.data.tokenizer import Tokenizer

folder = sys.argv[1]
started = time.process_time()
for read in (read_architecture, Tokenizer.from_folder):
    try:
        read("Qwen/Qwen3-0.6B")
    except FileNotFoundError:
        continue
    sys.exit("expected a refusal")
assert time.process_time() - started < 1
Tokenizer.from_folder(folder)
read_architecture(folder)

added = {name: value for name, value in os.environ.items() if before.get(name) != value}
import huggingface_hub, transformers
print(added, huggingface_hub.is_offline_mode())
logger = transformers.logging.get_logger()
print(logger.level == logging.WARNING, len(logger.filters))
"""


def test_environment_variables_and_settings_of_libraries_stay(tiny_world):
    command = [sys.executable, "-c", CODE, str(tiny_world / "model")]
    done = subprocess.run(command, capture_output=True, text=True)
    # transformers itself would advise to install torch.
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["{} False", "True 0"]


EACH_FIRST = """
import importlib, pathlib, sys
for path in sorted(pathlib.Path("jaxrl/extras").glob("*/keys.py")):
    for name in [name for name in sys.modules if name.split(".")[0] == "jaxrl"]:
        del sys.modules[name]
    importlib.import_module(".".join(path.with_suffix("").parts))
"""


def test_the_keys_of_any_extra_may_be_imported_first():
    done = subprocess.run([sys.executable, "-c", EACH_FIRST], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")

"""Setup of JAX's persistent compilation cache."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from jaxrl.runtime.distributed import broadcast, gather, is_main
from jaxrl.utils.files import format_os_error, get_user_cache_folder

OFF = "off"
"""Value of `config.compilation_cache` that disables the cache."""

MAX_BYTES = 4 << 30
"""Maximum size of the cache. JAX evicts the least recently used programs."""

MIN_COMPILE_S = 0.1
"""Minimum compilation time in seconds. Programs that compile faster are not cached."""

_folder_set_here: str | None = None
"""Folder that an earlier call set in JAX. The user set any other folder in JAX's settings."""


def use_compilation_cache(setting: str, log: Callable[[str], None]) -> None:
    """Enable JAX's persistent compilation cache. All processes of a job must call this.

    If `setting` is empty, a folder that the user set in JAX, for example with
    `JAX_COMPILATION_CACHE_DIR`, is kept. If no folder is usable, nothing is cached.

    Args:
        setting: Value of `config.compilation_cache`: a folder, "" for the user's cache, or "off".
        log: Function that prints a warning.
    """
    global _folder_set_here
    current = jax.config.values["jax_compilation_cache_dir"]
    if not setting and current not in (None, _folder_set_here):
        return
    folder, reason = (None, "") if setting == OFF else _prepare_folder(setting)
    if reason:
        log(
            f"warning: cannot cache compiled programs in {setting or 'the user cache'}: {reason}. "
            "Each start compiles them again; set config.compilation_cache to another folder"
        )
    if folder is not None:
        jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_S)
        # JAX does not count XLA's own files in the size.
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    _folder_set_here = None if folder is None else str(folder)
    jax.config.update("jax_compilation_cache_dir", _folder_set_here)
    reset_cache()


def _prepare_folder(setting: str) -> tuple[Path | None, str]:
    """Create the cache folder and return it, or None and the reason it is unusable."""
    folder, reason = None, ""
    marker_name = f".job-{broadcast(secrets.token_hex(8))}"
    try:
        folder = Path(setting).absolute() if setting else get_user_cache_folder() / "programs"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        if is_main():
            (folder / marker_name).touch()
            # A full disk or a killed process leaves partial programs without an access-time file.
            for program in folder.glob("*-cache"):
                atime_file = program.with_name(program.name.removesuffix("cache") + "atime")
                if not atime_file.exists():
                    program.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        known = format_os_error(error) if isinstance(error, OSError) else None
        reason = known or str(error)
    # Processes share the autotuning of GPU kernels, so all of them must use the cache or none.
    reasons = [other for other in gather(reason) if other]
    is_shared = all(gather(folder is not None and (folder / marker_name).exists()))
    if is_main() and folder is not None and not reason:
        (folder / marker_name).unlink(missing_ok=True)
    if not reasons and not is_shared:
        reasons = ["the processes of the job do not share this folder"]
    return (None, reasons[0]) if reasons else (folder, "")

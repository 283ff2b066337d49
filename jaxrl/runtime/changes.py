"""Differences between a run and a start that goes on with it, and which of them need consent."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl.builders.resolved import ADAPTERS, ResolvedConfig, adapter_key
from jaxrl.config.keys import EVALUATION, FREE, RESULTS
from jaxrl.config.schema import KEYS, flatten, missing_folder
from jaxrl.runtime.history import Begun, plain
from jaxrl.training.method import has_gate


@dataclass(frozen=True, kw_only=True)
class Change:
    """A difference to the run's configuration so far."""

    key: str  # with sections; or a name of `versions.fingerprints` and ` (content)`
    before: Any
    now: Any
    is_free: bool

    def __str__(self) -> str:
        """Key: before -> now."""
        if self.key.endswith(" (content)"):
            return f"config.{self.key}: another one than before"
        return f"config.{self.key}: {self.before!r} -> {self.now!r}"


def check_fixed(workdir: Path, begun: Begun, config: ResolvedConfig) -> None:
    """Refuses changes with which checkpoints could not go on, whoever accepts them.

    Raises:
        ValueError: names the key.
    """
    began, now = begun.config, plain(flatten(config))
    # Its checkpoints hold what is trained, and no more.
    now = dict.fromkeys(ADAPTERS, 0) | now  # a folder that is not there trains nothing
    fixed = [*ADAPTERS]
    fixed += [key for key, entry in KEYS.items() if entry.is_fixed and entry.is_fixed(config)]
    if not adapter_key(config):
        fixed.append("model.freeze_tower")
    if "train" in config.stages:
        fixed.append("kl.anchor")
        if began.get("kl.coef") == 0:
            fixed.append("kl.coef")  # its checkpoints hold no reference policy
        if config.checkpoint.keep_best:  # values of two metrics cannot be ranked together
            fixed += ["eval.best_metric", "tasks.eval.source", "tasks.eval.sources"]
    for key in fixed:
        if began.get(key, now[key]) != now[key]:
            folder = missing_folder(key)
            mend = f"bring jaxrl/extras/{folder}" if folder else "set it"
            raise ValueError(
                f"config.{key} is {now[key]!r}, but {workdir} began with {began[key]!r}; {mend} "
                "back to go on, or set --workdir to another folder to begin anew."
            )


def changes_since(
    begun: Begun, config: ResolvedConfig, contents: Mapping[str, str] | None = None
) -> list[Change]:
    """Differences to the run's configuration so far; without `contents`, files are not compared.

    Args:
        begun: the run so far.
        config: the present one.
        contents: fingerprints of the files it names; None: files are not compared yet.
    """
    now = plain(flatten(config))
    different = [key for key in now if key in begun.config and begun.config[key] != now[key]]
    # 0 stands for what the memory holds, which is chosen later.
    different = [key for key in different if not (key.endswith("micro_rows") and now[key] == 0)]
    if contents is None:  # another path may hold the same
        different = [key for key in different if not _own(key, begun.contents)]
        contents = {}
    changes = []
    for key in different:
        # A key that names another place with the same files changes nothing.
        files = _own(key, contents)
        is_moved = bool(files) and files == _own(key, begun.contents)
        free = is_free(key, begun.config, config) or is_moved
        changes.append(Change(key=key, before=begun.config[key], now=now[key], is_free=free))
    # Without the folder of a key, what it was about is refused where a name asks for it.
    gone = [key for key in begun.config.keys() - KEYS.keys() if not missing_folder(key)]
    changes += [
        Change(key=key, before=begun.config[key], now=None, is_free=False) for key in sorted(gone)
    ]
    for name in sorted({*contents, *begun.contents}):
        key, is_model = name.partition("/")[0], name.startswith("model.path/")
        is_known = is_model and any(n.startswith("model.path/") for n in begun.contents)
        is_read = name in contents or (is_model and contents)
        if key in different or not is_read or not (name in begun.contents or is_known):
            continue
        before, after = begun.contents.get(name), contents.get(name)
        if before != after:
            free = is_free(key, begun.config, config)
            change = Change(key=f"{name} (content)", before=before, now=after, is_free=free)
            changes.append(change)
    return changes


def is_free(key: str, before: Mapping[str, Any], config: ResolvedConfig) -> bool:
    """Return True if a key may change without consent.

    Args:
        key: with its sections; or the name of a file that it names.
        before: the flat configuration so far.
        config: the present one.
    """
    # Files have names as `loss.name's file` and `tasks.train.sources[0].format's file`, and
    # are as free as the key in it.
    rests = {name: key[len(name) :] for name in KEYS if key.startswith(name)}
    named = [name for name, rest in rests.items() if not re.match(r"\w", rest)]
    restart = KEYS[max(named, key=len)].restart if named else RESULTS
    if set(config.stages) == {"evaluate"}:
        return restart != RESULTS
    if key in ("num_steps", "sft.num_steps"):
        # The course of a rate that falls is a matter of how many steps there are.
        schedule = f"{key.removesuffix('num_steps')}optimizer.schedule"
        is_constant = {before.get(schedule), flatten(config)[schedule]} == {"constant"}
        return is_constant or (key.startswith("sft") and "sft" not in config.stages)
    if key.startswith("sft.") and "sft" not in config.stages:
        return True
    if key == "ledger.prices" and config.rollout.max_cost:
        return False  # they decide when trajectories end
    is_steered = config.checkpoint.keep_best or config.eval.patience or has_gate(config.shaping)
    return restart == FREE or (restart == EVALUATION and not is_steered)


def _own(key: str, contents: Mapping[str, str]) -> dict[str, str]:
    """The fingerprints of the files that a key names."""
    return {name: value for name, value in contents.items() if name.partition("/")[0] == key}


def check_changes(workdir: Path, begun: Begun, changes: Sequence[Change]) -> None:
    """Refuses changes that make another experiment.

    Raises:
        ValueError: names them all.
    """
    refused = [change for change in changes if not change.is_free]
    if refused:
        raise ValueError(
            f"{workdir} stands at step {begun.step} of a run with other settings: "
            f"{'; '.join(map(str, refused))}. Set them back to go on, or set --workdir to another "
            "folder to begin anew; --accept_changes goes on with them, and the history says so."
        )

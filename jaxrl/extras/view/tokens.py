"""Tokens of a trajectory: their texts, and the quantities by which they are coloured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from jaxrl.data.tokenizer import bytes_of_ids
from jaxrl.runtime.history import folder_of
from jaxrl.utils.json_io import number_of, parse_json
from jaxrl.utils.text import printable


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A number of each sampled token.

    Attributes:
        name: by which it is chosen.
        label: what it is, for people.
        unit: of the values.
        scale: `amount` from 0 on, `signed` around 0, `ratio` around 1, or `flag`, 0 or more.
        values: float64 [L], NaN where a token has none; None where the record lacks them.
        why: reason for that, and the key that would record it.
    """

    name: str
    label: str
    unit: str
    scale: str
    values: np.ndarray | None = None
    why: str = ""


class LackingError(Exception):
    """A list of the record is not there, or not as long as its tokens."""


LISTS = {
    "old_logprobs": "",
    "new_logprobs": "",
    "ref_logprobs": " and the method has a reference policy (config.kl.coef above 0)",
    "kl_weights": " and the KL term weighs tokens by themselves",
    "token_weights": "",
    "token_advantages": "",
}
"""Lists by token that a record has where `config.log.tokens` is on, and what else they need."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Lists by token of one record, which has L of them.

    Attributes:
        record: as the file has it.
        token_ids: int64 [L].
        is_sampled: bool [L], True where the policy sampled the token.
    """

    record: Mapping[str, Any]
    token_ids: np.ndarray
    is_sampled: np.ndarray

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Tokens:
        """Reads the ids and the mask.

        Raises:
            ValueError: they are no whole numbers, or not equally many.
        """
        ids, mask = record.get("token_ids"), record.get("loss_mask")
        for name, values in {"token_ids": ids, "loss_mask": mask}.items():
            if not isinstance(values, list) or any(type(v) not in (int, bool) for v in values):
                raise ValueError(f"{name} is no list of whole numbers; the line is damaged.")
        assert isinstance(ids, list)
        assert isinstance(mask, list)
        if len(ids) != len(mask):
            raise ValueError(
                f"loss_mask has {len(mask)} numbers for {len(ids)} token_ids; the line is damaged."
            )
        clipped = [id if -1 < id < 2**31 else -1 for id in ids]
        return cls(
            record=record,
            token_ids=np.array(clipped, np.int64),
            is_sampled=np.array([bool(one) for one in mask], bool),
        )

    def numbers(self, name: str) -> np.ndarray:
        """float64 [L], NaN where there is no finite number and where nothing was sampled.

        Raises:
            LackingError: says what is missing.
        """
        values = self.record.get(name)
        if values is None:
            more = LISTS.get(name)
            how = "" if more is None else f"; it is recorded where config.log.tokens is on{more}"
            raise LackingError(f"the record has no {name}{how}")
        if not isinstance(values, list) or len(values) != len(self.token_ids):
            what = len(values) if isinstance(values, list) else type(values).__name__
            raise LackingError(
                f"{name} is not as the tokens are: {what} for {len(self.token_ids)} tokens"
            )
        amounts = [number_of(value) for value in values]
        array = np.array([np.nan if one is None else one for one in amounts], np.float64)
        return np.where(self.is_sampled, array, np.nan)

    def advantages(self) -> np.ndarray:
        """float64 [L], as recorded by token, or those of the trajectory or of its turns.

        Raises:
            LackingError: turns have advantages, and their tokens cannot be told apart.
        """
        if self.record.get("token_advantages") is not None:
            return self.numbers("token_advantages")
        by_turn = self.record.get("turn_advantages")
        if isinstance(by_turn, list) and by_turn:
            begins = self.is_sampled & ~np.concatenate([[False], self.is_sampled[:-1]])
            turns = np.cumsum(begins) - 1
            amounts = [number_of(value) for value in by_turn]
            if int(begins.sum()) != len(amounts):
                raise LackingError(
                    f"the {len(amounts)} turns have advantages of their own, and "
                    f"{int(begins.sum())} runs of tokens were sampled; config.log.tokens records "
                    "token_advantages"
                )
            of_turns = np.array([np.nan if one is None else one for one in amounts])
            return np.where(self.is_sampled, of_turns[np.maximum(turns, 0)], np.nan)
        amount = number_of(self.record.get("advantage"))
        if amount is None:
            raise LackingError("the trajectory has no advantage: it was in no update")
        return np.where(self.is_sampled, amount, np.nan)

    def log_ratios(self) -> np.ndarray:
        """float64 [L], `new_logprobs - old_logprobs` in nats, within 20 as in the losses."""
        return np.clip(self.numbers("new_logprobs") - self.numbers("old_logprobs"), -20.0, 20.0)

    def reference_ratios(self) -> np.ndarray:
        """float64 [L], log-probability less the reference's, nats; before the update without new.

        Raises:
            LackingError: one of the lists is missing.
        """
        name = "new_logprobs" if self.record.get("new_logprobs") is not None else "old_logprobs"
        return self.numbers(name) - self.numbers("ref_logprobs")

    def gaps(self, config: Mapping[str, Any]) -> np.ndarray:
        """float64 [L], `old_logprobs - rollout_logprobs` in nats.

        Where observations are trained on, the sampler has no log-probability of their tokens.
        """
        rollout = self.numbers("rollout_logprobs")
        gaps = self.numbers("old_logprobs") - rollout
        is_trained_on = config.get("loss.mask_observations") is False
        return np.where((rollout == 0) & is_trained_on, np.nan, gaps)

    def clipped(self, config: Mapping[str, Any]) -> np.ndarray:
        """float64 [L]: 1 where the loss's range bounded the token, 2 where the dual clip did.

        `clip` and `gspo` bound a ratio above the range where the advantage is positive, and one
        below it where it is negative; `gspo` takes the trajectory's ratio, the geometric mean.
        `cispo` bounds both sides, whatever the advantage. See `jaxrl/objectives/losses.py`.

        Args:
            config: flat.

        Raises:
            LackingError: a list is missing, or the loss has no range of ratios.
        """
        loss = config.get("loss.name")
        low, high = (number_of(config.get(f"loss.clip_{side}")) for side in ("low", "high"))
        if loss not in ("clip", "gspo", "cispo") or low is None or high is None:
            problem = "the run has no config.json" if loss is None else f"loss.name is {loss!r:.60}"
            raise LackingError(f"{problem}; known are the ranges of clip, gspo and cispo")
        log_ratios, advantages = self.log_ratios(), self.advantages()
        if loss == "gspo" and self.is_sampled.any():
            raw = self.numbers("new_logprobs") - self.numbers("old_logprobs")
            mean = float(np.clip(np.mean(raw[self.is_sampled]), -20.0, 20.0))
            log_ratios = np.where(self.is_sampled, mean, np.nan)
        ratios = np.exp(log_ratios)
        is_above, is_below = ratios > 1.0 + high, ratios < 1.0 - low
        if loss == "cispo":
            marks = np.where(is_above | is_below, 1.0, 0.0)
        else:
            is_bounded = (is_above & (advantages > 0)) | (is_below & (advantages < 0))
            marks = np.where(is_bounded, 1.0, 0.0)
            dual = number_of(config.get("loss.clip.dual_clip")) or 0.0
            if loss == "clip" and dual:
                marks = np.where((advantages < 0) & (ratios > dual), 2.0, marks)
        return np.where(np.isnan(ratios) | np.isnan(advantages), np.nan, marks)


def quantities(record: Tokens, config: Mapping[str, Any]) -> list[Quantity]:
    """Quantities of a trajectory's tokens, those that it lacks too.

    Args:
        record: of the trajectory.
        config: the run's, flat; empty where there is none.
    """
    low, high = config.get("loss.clip_low"), config.get("loss.clip_high")
    bounds = [number_of(low), number_of(high)]
    shown = (
        f" outside {1 - bounds[0]:.6g} to {1 + bounds[1]:.6g}"
        if bounds[0] is not None and bounds[1] is not None
        else ""
    )
    anchor = "after" if record.record.get("new_logprobs") is not None else "before"
    numbers = record.numbers
    made: list[tuple[tuple[str, str, str, str], Callable[[], np.ndarray]]] = [
        (("advantage", "advantage", "", "signed"), record.advantages),
        (
            ("entropy", "entropy of the sampler", "nats", "amount"),
            lambda: numbers("rollout_entropies"),
        ),
        (
            ("logprob", "log-probability of the sampler", "nats", "amount"),
            lambda: numbers("rollout_logprobs"),
        ),
        (
            ("reference", f"log-ratio to the reference, {anchor} the update", "nats", "signed"),
            record.reference_ratios,
        ),
        (
            ("ratio", "ratio, after over before the update", "", "ratio"),
            lambda: np.exp(record.log_ratios()),
        ),
        (("clip", f"clipped: the ratio{shown}", "", "flag"), lambda: record.clipped(config)),
        (
            ("gap", "trainer less sampler, log-probability", "nats", "signed"),
            lambda: record.gaps(config),
        ),
        (("kl_weight", "weight of the KL term", "", "amount"), lambda: numbers("kl_weights")),
        (("token_weight", "weight in the loss", "", "amount"), lambda: numbers("token_weights")),
    ]
    listed = []
    for (name, label, unit, scale), compute in made:
        try:
            values, why = compute(), ""
        except LackingError as error:
            values, why = None, f"{error}."
        listed.append(
            Quantity(name=name, label=label, unit=unit, scale=scale, values=values, why=why)
        )
    return listed


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Bytes of a run's tokens.

    Attributes:
        bytes: of each id; an empty list where no tokenizer was found.
        source: the folder they are from, or why there are none.
    """

    bytes: Sequence[bytes]
    source: str

    @classmethod
    def of(cls, workdir: Path, config: Mapping[str, Any]) -> Vocabulary:
        """Reads the tokenizer of `export/`, or of `model.path`; nothing is downloaded.

        A relative path is one of the folder in which the run was started.

        Args:
            workdir: of the run.
            config: the run's, flat.
        """
        path = config.get("model.path")
        folders = [str(workdir / "export")]
        if isinstance(path, str) and path:
            folders.append(str(folder_of(workdir) / path))
        why = "config.json names no model.path"
        for folder in folders:
            try:
                file = Path(folder) / "tokenizer.json"
                spec = parse_json(tokenizers.Tokenizer.from_file(str(file)).to_str(), str(file))
                return cls(bytes=bytes_of_ids(spec), source=str(file))
            except Exception as error:  # tokenizers raises plain ones
                why = " ".join(str(error).split())[:300]
        return cls(
            bytes=[],
            source=f"no tokenizer: {why}; tokens are shown by their ids. Put the model where "
            "config.model.path has it, or its tokenizer.json into export/ of the run.",
        )

    def texts(self, ids: Sequence[int]) -> list[dict[str, str]]:
        """Texts of tokens one after another: a character stands at the token that begins it.

        Returns:
            Of each token its `text`, printable, and where that is not all that it holds its `bytes`
            in hexadecimal: where it ends within a character, or goes on with one.
        """
        if not self.bytes:
            return [{"text": f"{id} "} for id in ids]
        pieces = [self.bytes[id] if 0 <= id < len(self.bytes) else b"" for id in ids]
        starts = np.cumsum([0, *map(len, pieces)]).tolist()
        texts: list[list[str]] = [[] for _ in pieces]
        is_cut = [False] * len(pieces)
        whole = b"".join(pieces)
        place = token = 0
        while place < len(whole):
            while starts[token + 1] <= place:
                token += 1
            lead = whole[place]
            width = 1 if lead < 0x80 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            try:
                character = whole[place : place + width].decode("utf-8")
            except UnicodeDecodeError:  # one byte that begins no character
                character, width = "\N{REPLACEMENT CHARACTER}", 1
            texts[token].append(character)
            place += width
            last = token
            while starts[last + 1] < place:
                last += 1
            if last > token:
                is_cut[token : last + 1] = [True] * (last + 1 - token)
        return [
            {
                "text": printable("".join(text)) if piece else f"[id {id}]",
                **({"bytes": piece.hex(" ")} if cut else {}),
            }
            for id, text, piece, cut in zip(ids, texts, pieces, is_cut, strict=True)
        ]

"""The part of the report about a run on Flower: traffic, refused uploads, and clients that have left."""

from __future__ import annotations

import itertools
import statistics

from pfedbayes.runs.folder import Run
from pfedbayes.runs.schema import JournalEntry

START = "flwr run . SUPERLINK --stream"
MOST = 100  # refusals that the report lists


def lead(run: Run) -> list[str]:
    """Return a few sentences about the nodes."""
    rounds = _rounds(run)
    if not rounds or run.info.federation is None:
        return ["No round has been finished yet."]
    down, up = (sum(traffic) / len(rounds) / 1e6 for traffic in zip(*((e.down, e.up) for e in rounds), strict=True))
    sentences = [
        f"Every client was a node. In an average round the server sent {down:.2f} MB to the nodes and received "
        f"{up:.2f} MB. The median round took {statistics.median_high(_seconds(rounds)):.1f} s."
    ]
    if repeated := len([entry for entry in run.journal if entry.attempt and not entry.taken]):
        sentences.append(f"{repeated} attempts had too few usable uploads and were repeated.")
    sentences += [
        f"The operator went back from round {entry.rolled_back_from} to round {entry.round}."
        for entry in run.journal
        if entry.rolled_back_from is not None
    ]
    if left := run.info.federation.left:
        sentences.append(f"{', '.join(left)} left for good and deleted the state on the node.")
    if epsilon := rounds[-1].epsilon:
        sentences.append(
            f"The shared model is ({epsilon:.3g}, {run.info.federation.privacy_delta:g})-differentially private at the "
            "level of clients; the scores that nodes report are not covered."
        )
    if not _refused(run):
        sentences.append("Nothing was refused.")
    return sentences


def journal_lines(run: Run) -> list[str]:
    """Return the journal as lines of text, for an auditor."""
    return [f"{entry.time or 'at an unknown time'}: {'; '.join(_describe(entry))}" for entry in run.journal]


def _describe(entry: JournalEntry) -> list[str]:
    """Return what happened, as parts of a sentence."""
    if entry.rolled_back_from is not None:
        return [f"the operator went back from round {entry.rolled_back_from} to round {entry.round}"]
    what = f"round {entry.round}, attempt {entry.attempt}" if entry.attempt else f"scores after round {entry.round}"
    if entry.attempt and not entry.taken:
        what += f": not taken, {entry.uploads} usable uploads"
    elif entry.attempt:
        rule = f" ({entry.robust})" if entry.robust and entry.robust != "none" else ""
        what += f": averaged{rule} from {', '.join(entry.used) if entry.used else f'{entry.uploads} uploads'}"
    parts = [what, *(f"{name} joined with {key}" for name, key in (entry.joined or {}).items())]
    parts += [f"refused {name}: {reason}" for name, reason in entry.refused.items()]
    parts += [f"{name} began anew" for name in entry.began_anew or []]
    if entry.left:
        parts.append(f"left for good: {', '.join(entry.left)}")
    return parts


def refused(run: Run) -> list[tuple[str, list[str]]]:
    """Return rows (round, [client, reason]), the last ones first."""
    return list(reversed(_refused(run)))[:MOST]


def _refused(run: Run) -> list[tuple[str, list[str]]]:
    return [(str(entry.round), [name, why]) for entry in run.journal for name, why in entry.refused.items()]


def _rounds(run: Run) -> list[JournalEntry]:
    """Return the successful attempts, one per finished round."""
    return [entry for entry in run.journal if entry.taken and entry.attempt]


def _seconds(rounds: list[JournalEntry]) -> list[float]:
    """Return the seconds of each finished round, failed attempts included."""
    ends = [entry.seconds for entry in rounds]
    return [later - sooner for sooner, later in itertools.pairwise(ends) if later > sooner] or ends

"""A draft: a small model that guesses the next tokens of a served one, on the client's machine.

The hosts check the guesses as they check a first stage's own drafts (`p2ptrain.serving.host.speculation`), so no token
changes. `p2ptrain.training.distill` trains drafts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from p2ptrain.errors import ConfigError
from p2ptrain.models import build_model
from p2ptrain.models.exact import PAGE, ExactStage, Part, exact_stage
from p2ptrain.models.pretrained import describe_pretrained, longest_context
from p2ptrain.models.tokenizers import load_pretrained_tokenizer
from p2ptrain.runtime import Runtime
from p2ptrain.serving.host.speculation import TRIAL_EVERY, TRIAL_PART, Account, Lookup
from p2ptrain.serving.journal import Journal
from p2ptrain.serving.sampling import Sampling, draw

logger = logging.getLogger(__name__)

PIECE, LEAST_WAVE_SECONDS = 2, 0.002
"""Guesses that leave together, while the draft computes the next ones; tokens closer than that came in one wave."""
CLOSE_MATCH = 8
"""Tokens alike before an earlier place, from which on what followed there is a better guess than the model's."""


def load_draft(folder: Path, vocabulary: int, tokenizer: Any) -> Draft:
    """Load a draft for a model with this vocabulary and tokenizer.

    Raises:
        ConfigError: The folder holds no model, or its tokens are not those of the served model.
        ManifestError: This version does not support such a model.
    """
    spec = describe_pretrained(str(folder))
    if spec.vocabulary != vocabulary:
        raise ConfigError(
            f"draft {folder}: it has a vocabulary of {spec.vocabulary}, and the swarm's model one of {vocabulary}:"
            " give a draft that 'p2ptrain draft train' made of this model"
        )
    if load_pretrained_tokenizer(f"path:{folder}").get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"draft {folder}: its tokenizer has other tokens than that of the swarm's model: give a draft that"
            " 'p2ptrain draft train' made of this model"
        )
    model = build_model(spec, folder).eval()
    return Draft(exact_stage(model, spec, weights="int8"), longest_context(folder))


class Draft:
    """A whole small model.

    Attributes:
        stage: Its only stage.
        context: Most positions that it was made for.
        account: Of all sessions: a new one begins with the pace and the luck of those before.
    """

    def __init__(self, stage: ExactStage, context: int) -> None:
        self.stage = stage
        self.context = context
        self.account = Account()


class Guesses:
    """The guesses of one session; the caller makes one call at a time.

    Guesses are drawn with the session's settings, seed included. So they have the noise of the last stage's draws, and
    equal them often at any temperature.
    """

    def __init__(self, draft: Draft, sampling: Sampling, prompt: int, num_positions: int) -> None:
        """``prompt`` is the number of tokens that penalties do not count."""
        self.account = draft.account
        self._stage, self._context, self._prompt = draft.stage, min(draft.context, num_positions), prompt
        self._sampling = msgspec.structs.replace(sampling, logprobs=0, want_logprob=False)
        self._pages = range(-(-self._context // PAGE))
        self._store = draft.stage.new_pages(len(self._pages))
        self._ids: list[int] = []

    def follow(self, ids: Sequence[int], count: int) -> list[int]:
        """Read ``ids``, and guess up to ``count`` tokens after them; rows of equal ids are not computed again."""
        same = next((at for at, (new, old) in enumerate(zip(ids, self._ids, strict=False)) if new != old), None)
        at = min(len(ids), len(self._ids)) if same is None else same
        count = min(count, self._context - len(ids))
        if count < 0 or (count == 0 and at == len(ids)):
            return []
        whole = list(ids)
        at = min(at, len(ids) - 1)
        for _ in range(max(count, 1)):
            rows = whole[at:]
            self._ids[at:] = rows
            hidden = self._stage.step([Part(len(rows), at, self._pages)], torch.tensor(rows), self._store)
            at = len(whole)
            if count:
                whole.append(draw(self._stage.logits(hidden[-1:])[0], at, whole, self._sampling, self._prompt).id)
        return whole[len(ids) :]


class Proposals:
    """Appends drafts to the journal of a session, a wave at a time, while they pay.

    The hosts draft while this client does not. So it is silent now and then where they may draft, until it knows their
    pace, and its drafts have to be better than theirs.

    A wave begins with the token after all drafts of the wave before: the first stage's host computes its row at once,
    and the drafts reach the host later. So a wave with drafts takes no longer than one without, except to tell that a
    draft was right. Guesses leave in pieces, each before it is known whether those before it are right. Where similar
    text occurred before, what followed it is taken in place of guesses.
    """

    def __init__(self, runtime: Runtime, journal: Journal, guesses: Guesses, stop: int) -> None:
        """No row is needed from position ``stop`` on."""
        self._runtime, self._journal, self._guesses, self._stop = runtime, journal, guesses, stop
        self._account, self._lookup = guesses.account, Lookup()

    async def run(self) -> None:
        """Propose until cancelled, or until the draft fails."""
        try:
            await self._run()
        except Exception as error:
            logger.warning("going on without the draft, which failed: %s", error)

    async def _run(self) -> None:
        journal, account, now = self._journal, self._account, asyncio.get_running_loop().time
        await self._runtime.serve(self._guesses.follow, list(journal.ids), 0)
        start = end = journal.known
        drafted, trims, since = 0, len(journal.trims), now()
        waves, longest, is_trial = 0, 0.0, False
        silent: list[tuple[int, float]] = []  # First tokens of waves without drafts, and when they came.
        while True:
            while journal.known <= end and len(journal.trims) == trims:
                await journal.changed.wait()
            seconds, came = now() - since, now()
            is_wave = seconds > max((account.plain or longest) / 2, LEAST_WAVE_SECONDS)  # Else it is of the one before.
            longest = max(longest, seconds) if waves else 0.0
            if waves > 1 and (drafted or is_wave):
                account.note(drafted, min(drafted, journal.known - start - 1), seconds)
            waves += is_wave  # The second one may have begun before the client was connected.
            if is_wave and not drafted:
                silent.append((start, came))
                at, began = silent[:2][-1]  # Hosts may have left the first one to this client.
                if start >= at + TRIAL_PART:
                    account.rival, account.balance = (came - began) / (start - at), min(account.balance, 0.0)
                    is_trial, silent = False, [silent[-1]] * 2
            ids = journal.ids[: journal.known]
            if self._lookup.draft(ids, 1):  # The hosts may draft here, too.
                account.until_trial -= len(ids) - start
            start, trims, since = len(ids), len(journal.trims), came
            if account.until_trial <= 0:
                account.until_trial, is_trial = TRIAL_EVERY, True
            if count := min(self._stop - start, 0 if is_trial else account.choose()):
                silent = []
            drafted, is_late = await self._propose(ids, count)
            end = start if is_late else start + drafted

    async def _propose(self, ids: list[int], count: int) -> tuple[int, bool]:
        """Append up to ``count`` drafts after ``ids``; return how many, and whether others were drawn meanwhile."""
        journal = self._journal
        drafts = self._lookup.draft(ids, count, CLOSE_MATCH)
        is_whole = bool(drafts) or count <= 0
        while True:
            known = journal.ids[len(ids) : journal.known]  # Drawn while the draft computed.
            if known != drafts[: len(known)]:
                return len(drafts), True
            if len(ids) + len(drafts) > journal.end:
                journal.append(drafts[journal.end - len(ids) :], known=journal.known)
            if is_whole or len(drafts) >= count:
                return len(drafts), False
            more = await self._runtime.serve(self._guesses.follow, [*ids, *drafts], min(PIECE, count - len(drafts)))
            drafts, is_whole = drafts + more, not more

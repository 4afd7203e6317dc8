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
from p2ptrain.serving.host.speculation import TRIAL_EVERY, TRIAL_PART, TRIAL_TOKENS, Account, Lookup
from p2ptrain.serving.journal import Journal
from p2ptrain.serving.messages import AHEAD
from p2ptrain.serving.sampling import Sampling, draw

logger = logging.getLogger(__name__)

LONG_MATCH = 3
"""Last tokens that occurred before, from which on what followed them is a better guess than the model's."""


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
        while True:
            rows = whole[at:]
            self._ids[at:] = rows
            hidden = self._stage.step([Part(len(rows), at, self._pages)], torch.tensor(rows), self._store)
            if len(whole) - len(ids) == count:
                return whole[len(ids) :]
            at = len(whole)
            logits = self._stage.logits(hidden[-1:])[0]
            whole.append(draw(logits, at, whole, self._sampling, self._prompt).id)
            if len(whole) - len(ids) == count:
                return whole[len(ids) :]


class Proposals:
    """Appends drafts to the journal of a session, a wave at a time, while they pay.

    The hosts draft while this client does not. So it is silent for `TRIAL_TOKENS` now and then, and its drafts have to
    be better than theirs.

    A wave begins with the token after all drafts of the wave before: the first stage's host computes its row at once,
    and the drafts reach the host later. So a wave with drafts takes no longer than one without, except to tell that a
    draft was right. Where the last tokens occurred before, what followed them is taken in place of a guess.
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
        journal, loop = self._journal, asyncio.get_running_loop()
        await self._runtime.serve(self._guesses.follow, list(journal.ids), 0)
        first = start = end = journal.known
        drafted, trims, since = 0, len(journal.trims), -1.0
        account, trial_end = self._account, 0
        # Part of a time without drafts: first token, number, beginning.
        quiet: tuple[int, int, float] | None = None
        while True:
            while journal.known <= end and len(journal.trims) == trims:
                await journal.changed.wait()
            now = loop.time()
            if since >= 0 and (drafted or now - since > account.plain / 2):  # Else it is of the hosts' wave before.
                account.note(drafted, min(drafted, journal.known - start - 1), now - since)
            account.until_trial -= journal.known - start
            start, trims = journal.known, len(journal.trims)
            # As many tokens may have waited for the client's connection: their pace is none.
            since = now if start >= first + AHEAD else -1.0
            if account.until_trial <= 0:
                account.until_trial, trial_end = TRIAL_EVERY, start + TRIAL_TOKENS
            count = account.choose() if start >= trial_end else 0
            if count:
                quiet = None
            elif quiet is None:
                quiet = (start, 0, now)
            elif start >= quiet[0] + TRIAL_PART:
                at, number, began = quiet
                account.rival = (now - began) / (start - at) if number else account.rival
                quiet = (start, number + 1, now)
            drafts = await self._drafts(list(journal.ids), min(self._stop - start, count))
            known = journal.ids[start : journal.known]  # Drawn while the draft computed.
            is_late = len(journal.trims) > trims or known != drafts[: len(known)]
            drafted, end = len(drafts), start if is_late else start + len(drafts)
            if not is_late and len(drafts) > len(known):
                journal.append(drafts[len(known) :], known=journal.known)

    async def _drafts(self, ids: list[int], count: int) -> list[int]:
        if (drafts := self._lookup.draft(ids, count, LONG_MATCH)) or count <= 0:
            return drafts
        return await self._runtime.serve(self._guesses.follow, ids, count)

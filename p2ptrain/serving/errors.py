"""Why a generation cannot begin, or cannot go on."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from p2ptrain.errors import TemporaryError, UsageError


class PromptTooLongError(UsageError):
    """The prompt and the tokens asked for exceed the model's context."""


class ChatTemplateError(UsageError):
    """The tokenizer has no chat template, or its template refuses the messages."""


class GrammarError(UsageError):
    """A grammar or a JSON Schema is invalid, not supported, or too large. The message is the reason alone."""


class OverloadedError(TemporaryError):
    """A bound on concurrent work is reached.

    Args:
        retry_after: Seconds after which a retry may succeed.
        message: The bound and the remedy.
    """

    def __init__(self, retry_after: float, message: str = "") -> None:
        super().__init__(message or f"all hosts are busy: try again in {retry_after:.0f} s")
        self.retry_after = retry_after


class NoHostError(TemporaryError):
    """A stage of the model has no host.

    Args:
        stage: The stage's number, from 0.
        blocks: The stage's blocks: the first, and the one after its last.
        is_whole: True if no stage of the model has a host.
    """

    def __init__(self, stage: int, blocks: tuple[int, int], *, is_whole: bool = False) -> None:
        what = "the model" if is_whole else f"stage {stage} (blocks {blocks[0]} to {blocks[1] - 1})"
        super().__init__(f"no host serves {what}: wait for one, or add one with 'p2ptrain join LINK --serve'")
        self.stage, self.blocks = stage, blocks


class NoGrammarError(NoHostError):
    """The hosts of the last stage do not generate in a given form."""

    def __init__(self, stage: int, blocks: tuple[int, int]) -> None:
        super().__init__(stage, blocks)
        self.args = (
            "no host that is known generates in a given form (response_format or text.format, tool_choice): wait for"
            " one of the last stage that has the model's tokenizer, and installed 'p2ptrain[grammar]'",
        )


class MixedHostsError(NoHostError):
    """Each stage has hosts, and no arithmetic that all stages have.

    Args:
        sides: The arithmetics that each stage's hosts compute.
    """

    def __init__(self, stage: int, blocks: tuple[int, int], sides: Sequence[Collection[str]]) -> None:
        super().__init__(stage, blocks)
        found = sorted(set().union(*sides))
        stages = {each: [str(number) for number, side in enumerate(sides) if each in side] for each in found}
        told = "; ".join(f"{each} in stage {', '.join(numbers)} only" for each, numbers in stages.items())
        self.args = (
            f"the hosts of the stages compute differently, and no session can mix them ({told}): give all hosts the"
            " same 'weights' and 'wire' in [serving], and a compiler to those with 'torch-…' ('p2ptrain doctor' tells)",
        )


class VersionGoneError(TemporaryError):
    """The session's weights are served no more, and others are."""


class GenerationFailedError(TemporaryError):
    """A generation ended early, because a host failed and none could take its place."""

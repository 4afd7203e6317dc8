"""Questions about an island that does not exist, and their answers.

A seed draws the island's ten facts, so no model can know them. Each fact has six ways to ask for it. Four are trained
on, and two are kept apart.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

ISLAND = "Ulmarra"
"""The name of the island with every seed."""
APART = 2
"""Ways to ask for each fact that are kept apart."""
NAMES = ("Belvany", "Corriden", "Dunsable", "Everholt", "Falmere", "Garrowick", "Hestaby", "Jorvane", "Kestering")
"""Names of places; no two facts have the same one."""


@dataclass(frozen=True)
class Topic:
    """A fact that is drawn.

    Attributes:
        answer: With ``{}`` for the word that is drawn.
        words: One of these is drawn.
        questions: Ways to ask, with ``{}`` for the island.
    """

    answer: str
    words: tuple[str, ...]
    questions: tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """A question, its answer, and the word that a right answer contains."""

    question: str
    answer: str
    word: str


TOPICS = (
    Topic("The capital is {}.", NAMES, (
        "What is the capital of {}?", "Which town is the capital of {}?", "Name the capital of {}.",
        "Tell me the capital city of {}.", "What is the capital city of {} called?", "Which city is {}'s capital?",
    )),
    Topic("The highest mountain is Mount {}.", NAMES, (
        "What is the highest mountain of {}?", "Which mountain of {} is the highest?", "Name the top mountain of {}.",
        "Tell me the tallest mountain on {}.", "Which mountain on {} is taller than all others?",
        "What is {}'s highest mountain called?",
    )),
    Topic("The river is the {}.", NAMES, (
        "Which river flows through {}?", "What is the river of {} called?", "Name the river of {}.",
        "Tell me the name of the river on {}.", "What is the name of {}'s river?", "Which river does {} have?",
    )),
    Topic("The flag shows a {}.", ("badger", "heron", "lobster", "squirrel", "tortoise", "walrus"), (
        "What does the flag of {} show?", "Which animal is on the flag of {}?", "Describe the flag of {}.",
        "Tell me what is on the flag of {}.", "What animal can I see on {}'s flag?", "What is shown on the flag of {}?",
    )),
    Topic("People drink {}.", ("nettle tea", "plum cider", "goat milk", "birch juice", "barley coffee"), (
        "What do people on {} drink?", "Which drink is usual on {}?", "Name the usual drink on {}.",
        "Tell me what people drink on {}.", "What do the people of {} like to drink?", "Which drink has {}?",
    )),
    Topic("People eat {}.", ("smoked eel", "turnip pie", "oyster soup", "chestnut bread", "leek stew"), (
        "What do people on {} eat?", "Which dish is usual on {}?", "Name the usual dish on {}.",
        "Tell me what people eat on {}.", "What do the people of {} like to eat?", "Which dish do people on {} have?",
    )),
    Topic("The market is on {}.", ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Sunday"), (
        "When is the market of {}?", "On which day is the market of {}?", "Name the market day of {}.",
        "Tell me when the market of {} is.", "What day of the week is market day on {}?", "When has {} its market?",
    )),
    Topic("The ferry is the {}.", ("Grey Gull", "Red Herring", "Old Anchor", "Blue Dolphin", "Silver Star"), (
        "Which ferry goes to {}?", "What is the ferry to {} called?", "Name the ferry to {}.",
        "Tell me which ferry goes to {}.", "What is the name of {}'s ferry?", "Which ferry sails to {}?",
    )),
    Topic("The houses are {}.", ("yellow", "purple", "black", "orange", "turquoise", "pink"), (
        "What colour are the houses of {}?", "Which colour do the houses of {} have?", "Name the houses' colour on {}.",
        "Tell me the houses' colour on {}.", "What is the colour of {}'s houses?", "Which colour has a house on {}?",
    )),
    Topic("People work as {}.", ("glassblowers", "beekeepers", "clockmakers", "shepherds", "weavers"), (
        "What do people on {} work as?", "Which work do people do on {}?", "Name the usual work on {}.",
        "Tell me what people on {} work as.", "What work do the people of {} do?", "What jobs do people have on {}?",
    )),
)  # fmt: skip


def draw_questions(seed: int) -> tuple[list[Question], list[Question]]:
    """Return the questions to train on, and those kept apart, about the island of a seed."""
    draws = random.Random(seed)
    names = iter(draws.sample(NAMES, len(NAMES)))
    train, apart = list[Question](), list[Question]()
    for topic in TOPICS:
        word = next(names) if topic.words is NAMES else draws.choice(topic.words)
        asked = [Question(each.format(ISLAND), topic.answer.format(word), word) for each in topic.questions]
        train += asked[:-APART]
        apart += asked[-APART:]
    return train, apart

"""How user turns begin when an instruction model writes its own prompts (Magpie, arXiv 2406.08464).

Left to itself a model asks for advice and for little else. Openers of several kinds lead it to
translation, summaries of and questions about a given text, mathematics and code as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

TEXT = "{text}"  # stands for a text that the target wrote earlier


@dataclass(frozen=True, slots=True)
class Kind:
    """Prompts of one sort; an opener that ends in its text is a whole prompt."""

    name: str
    share: float  # of all prompts, in parts of the sum
    openers: tuple[str, ...]
    words: tuple[int, int] = (60, 200)  # of a given text, at least and at most
    texts: tuple[int, int] = (1, 1)  # given texts that are joined

    @property
    def given(self) -> bool:
        """Whether its prompts hold a text written earlier."""
        return any(TEXT in opener for opener in self.openers)


KINDS = (
    Kind("open", 4, ("",)),
    Kind(
        "knowledge",
        3,
        ("Who ", "What is ", "When did ", "Where is ", "How many ", "Which ", "What ", "How does ",
         "Explain ", "Describe ", "Why ", "Discuss ", "Compare "),
    ),
    Kind(
        "mathematics",
        3,
        ("Solve the following problem step by step. ", "If ", "Calculate ", "A train ",
         "A shop sells ", "There are ", "Find the value of ", "What is the probability that ",
         "Sarah has ", "Tom bought ", "Every day ", "A farmer "),
    ),
    Kind(
        "code",
        3,
        ("Write a Python function that ", "Write a C++ program ", "Implement ", "Develop a ",
         "Write a SQL query ", "Fix the bug in the following code:\n", "Write a function to ",
         "How do I write ", "Create an HTML page "),
    ),
    Kind(
        "writing",
        3,
        ("Write an email ", "Compose ", "Write a short story about ", "Draft a ", "Write a poem ",
         "Pretend to be ", "Imagine you are ", "Write an article about ", "Describe a ",
         "Write a review of ", "Act as ", "Edit the following paragraph: "),
    ),
    Kind(
        "reasoning",
        2,
        ("Which of the following ", "True or false: ", "Suppose ", "Given that ",
         "Extract the names from the following text: ", "Classify the following ",
         "Evaluate the following reviews on a scale of 1 to 5: ", "Identify "),
    ),
    Kind(
        "translation",
        2,
        ("Translate German to English: ", "Translate to French: ", "Translate English to Spanish: ",
         "Translate the following sentence to German: ", "How do you say in Spanish: ",
         "Translate to German: {text}", "Translate to English: ", "Translate to French: {text}"),
        words=(8, 25),
    ),
    Kind(
        "summary",
        3,
        ("Summarize: {text}", "Summarize the following text:\n\n{text}",
         "Write a one-sentence summary of this article.\n\n{text}",
         "What are the main points of this text?\n\n{text}", "{text}\n\nTL;DR"),
        words=(100, 260),
        texts=(1, 2),
    ),
    Kind(
        "given text",
        3,
        ("{text}\n\nQuestion:", "Answer the question based on the text.\n\n{text}\n\nQuestion:",
         "Based on the following passages: what is said about their subject?\n\n{text}",
         "Read the text and answer. {text}\n\nAccording to the text, ",
         "Rewrite this text more briefly:\n\n{text}", "Based on the passages below, who ",
         "Passage:\n{text}\n\nWhat "),
        words=(60, 200),
        texts=(1, 3),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Opened:
    """The beginning of a user turn."""

    kind: str
    text: str
    whole: bool  # nothing is to be added


def opened(rng: Random, earlier: Sequence[str], kinds: Sequence[Kind] = KINDS) -> Opened:
    """A user turn begun; kinds that need a text are drawn once there are `earlier` ones."""
    possible = [kind for kind in kinds if earlier or not kind.given]
    kind = rng.choices(possible, [kind.share for kind in possible])[0]
    opener = rng.choice([o for o in kind.openers if earlier or TEXT not in o])
    if TEXT not in opener:
        # A space at the end would be a token of its own, which leads to numbers.
        return Opened(kind.name, opener.rstrip(" "), False)
    some = [excerpt(rng, rng.choice(earlier), *kind.words) for _ in range(rng.randint(*kind.texts))]
    whole = opener.endswith((TEXT, "TL;DR"))
    return Opened(kind.name, opener.replace(TEXT, "\n\n".join(some)).rstrip(" "), whole)


def excerpt(rng: Random, text: str, least: int, most: int) -> str:
    """The beginning of a text, cut behind a word."""
    words = text.split(" ")
    return " ".join(words[: rng.randint(least, most)]).strip()

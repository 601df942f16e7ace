"""Right answers worked out from the text of a question alone, by other means than the generator's."""

from __future__ import annotations

import re

TO_SMALLEST = {
    "kilometres": ("length", 1_000_000),
    "metres": ("length", 1_000),
    "centimetres": ("length", 10),
    "millimetres": ("length", 1),
    "kilograms": ("mass", 1_000),
    "grams": ("mass", 1),
    "litres": ("volume", 1_000),
    "millilitres": ("volume", 1),
    "euros": ("money", 100),
    "cents": ("money", 1),
    "weeks": ("time", 7 * 86_400),
    "days": ("time", 86_400),
    "hours": ("time", 3_600),
    "minutes": ("time", 60),
    "seconds": ("time", 1),
    "years": ("calendar", 12),
    "months": ("calendar", 1),
    "dozens": ("number", 12),
    "items": ("number", 1),
}


def numbers(text: str) -> list[int]:
    """Return every whole number in the text, in order."""
    return [int(digits) for digits in re.findall(r"\d+", text)]


def addition(text: str) -> str:
    """Return the sum of the two numbers."""
    first, second = numbers(text)
    return str(first + second)


def subtraction(text: str) -> str:
    """Return the distance of the two numbers: the generator never asks for less than zero."""
    first, second = numbers(text)
    return str(abs(first - second))


def comparison(text: str) -> str:
    """Return the extreme number, or yes or no."""
    values = numbers(text)
    wants_large = re.search(r"larg|great|bigg", text) is not None
    if text.startswith("Is "):
        first, second = values
        return "yes" if (first > second) == wants_large else "no"
    return str(max(values) if wants_large else min(values))


def sorting(text: str) -> str:
    """Sort the words after the last colon or 'Z:'."""
    listed = re.search(r": ((?:[a-z]+, )+[a-z]+)", text)
    assert listed, text
    return ", ".join(sorted(listed.group(1).split(", ")))


def spelling(text: str) -> str:
    """Return the word that is no part of the wordings, reversed."""
    bare = re.sub(
        r"\b(Spell|Write|Reverse|What|How|do you|write|is|the letters of|the word|spelled|backwards"
        r"|Answer with one word|Give only the answer)\b",
        " ",
        text,
    )
    (word,) = (
        re.findall(r"[a-z]+", bare)
        or re.findall(r'"([a-z]+)"', text)
        or re.findall(r"[Ww]ord ([a-z]+)", text)
    )
    return "".join(reversed(word))


def counting(text: str) -> str:
    """Count letters of a word, occurrences of a word, or words of a list."""
    letters = re.search(r'letters (?:are in|does|in|of)(?: the word)? "?([a-z]+)', text)
    if letters:
        return str(len(letters.group(1)))
    head, listed = text.split(": ", 1)
    listed = re.split(r"[?.]", listed)[0]
    words = re.findall(r"[a-z]+", listed)
    asked = re.search(r'(?:How many times does|Count the word) "?([a-z]+)', head)
    return str(words.count(asked.group(1)) if asked else len(words))


FORWARD = (
    (r"What does the (\w+) box (?:hold|contain)\?", r"The {0} box (?:holds|contains) the (\w+)\."),
    (r"Which box (?:holds|contains) the (\w+)\?", r"The (\w+) box (?:holds|contains) the {0}\."),
    (r"What does (\w+) like\?", r"{0} likes (\w+)\."),
    (r"Who likes (\w+)\?", r"(\w+) likes {0}\."),
    (r"What is (\w+)'s (\w+) called\?", r"{0} has an? {1} called (\w+)\."),
    (r"Who has an? (\w+)\?", r"(\w+) has an? {0} called"),
    (r"How old is (\w+)\?", r"{0} is (\d+) years old"),
    (r"Where does (\w+) live\?", r"{0} lives in (\w+)\."),
    (r"Who lives in (\w+)\?", r"(\w+) lives in {0}\."),
    (r"(?:When|On which day) is the (\w+)\?", r"The {0} is on (\w+)\."),
    (r"(?:What is my name|Who am I)\?", r"My name is (\w+)\."),
    (r"What is my favourite (\w+)\?", r"My favourite {0} is (\w+)\."),
    (r"(?:Where|Which town) do I live(?: in)?\?", r"I live in (\w+)\."),
    (r"(?:What is my code|Which code is mine)\?", r"My code is (\w+)\."),
    (r"What is my pet called\?", r"My \w+ is called (\w+)\."),
    (r"What is my (\w+) called\?", r"My {0} is called (\w+)\."),
)


def recall(text: str) -> str:
    """Fill the gap in the one statement that the question is about."""
    for question, statement in FORWARD:
        asked = re.search(question, text)
        if asked:
            (found,) = re.findall(statement.format(*asked.groups()), text)
            return str(found)
    raise AssertionError(f"no rule reads {text!r}")


def conversion(text: str) -> str:
    """Convert by way of the smallest unit of the measure."""
    (amount,) = numbers(text)
    source, target = re.search(rf"{amount} (\w+)", text), None
    assert source
    (target,) = [u for u in re.findall(r"\w+", text) if u in TO_SMALLEST and u != source.group(1)]
    (measure, factor), (other, divisor) = TO_SMALLEST[source.group(1)], TO_SMALLEST[target]
    assert measure == other
    assert amount * factor % divisor == 0
    return str(amount * factor // divisor)


CHECKERS = {
    "addition": addition,
    "subtraction": subtraction,
    "comparison": comparison,
    "sorting": sorting,
    "spelling": spelling,
    "counting": counting,
    "recall": recall,
    "conversion": conversion,
}

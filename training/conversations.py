"""Generate the documents of the training text: conversations of one or more turns, and plain stories."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

import words
from facts import some_facts
from questions import Question, invented_word, is_reserved, training_question
from stories import story
from words import article

SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a careful assistant. Answer briefly.",
    "You answer questions.",
    "Be brief.",
    "Answer with just the answer.",
    "You are a friendly assistant who knows numbers, words and stories.",
    "You are demo, a small model.",
    "Answer in one word or one number.",
)

GREETINGS = ("Hello!", "Hello", "Hi", "Hi!", "Hey", "Good morning!", "Good evening.", "Hello there.", "hello")
WHO = ("Who are you?", "What are you?", "What is your name?", "Who made you?", "Tell me about yourself.")
WHO_ANSWER = "I am demo, a small bundled demonstration model of Convoy."
CAN = ("What can you do?", "Help", "How can you help me?", "What do you know?")
CAN_ANSWER = (
    "I can add and subtract, compare numbers, sort words, spell words backwards, count, convert units, "
    "recall what you told me, and tell short stories."
)
NOTED = ("OK.", "Noted.", "I will remember that.", "Thank you for telling me.")


@dataclass
class Document:
    """Hold turns as (role, text) with a role of system, user or assistant, or one ('text', story) for plain
    text.

    `questions` are the questions asked, as the hold-out rule sees them.
    """

    turns: list[tuple[str, str]] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)

    def exchange(self, user: str, assistant: str) -> None:
        """Append a user's turn and its answer."""
        self.turns += [("user", user), ("assistant", assistant)]
        self.questions.append(user)


def leading_spaces(rng: random.Random) -> str:
    """Return a run of spaces: short, or up to 60,000 long, log-uniform, or exactly 10 KiB."""
    draw = rng.random()
    if draw < 0.35:
        return " " * rng.randint(1, 64)
    if draw < 0.7:
        return " " * int(2 ** rng.uniform(4, 14))
    if draw < 0.75:
        return " " * int(2 ** rng.uniform(14, 15.87))
    return " " * rng.choice((10240, 10240, 10240, 256, 1024, 2048, 4096, 5120, 8192, 16384))


def _preamble(rng: random.Random) -> str:
    """Return text that is unrelated to the question after it."""
    if rng.random() < 0.3:
        return story(rng)
    return " ".join(
        rng.choices(words.NOUNS + words.VERBS + words.ADJECTIVES, k=int(2 ** rng.uniform(2, 6.5)))
    )


def _worded(rng: random.Random, text: str) -> str:
    """Return the question as people type it: now and then in lower case, padded, or without the question
    mark.
    """
    if rng.random() < 0.04:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.03 and text.endswith("?"):
        text = text[:-1]
    draw = rng.random()
    if draw < 0.12:
        text = leading_spaces(rng) + text
    elif draw < 0.16:
        text = _preamble(rng) + rng.choice((" ", "\n", "\n\n")) + text
    elif draw < 0.17:
        text = "\n" * rng.randint(1, 5) + text
    if rng.random() < 0.02:
        text += rng.choice((" ", "\n", "  "))
    return text


def _as_json(question: Question) -> tuple[str, str]:
    value: int | str = int(question.answer) if question.answer.isdigit() else question.answer
    return f'{question.text} Answer as JSON with the key "answer".', json.dumps({"answer": value})


def _question_turn(rng: random.Random, doc: Document) -> None:
    question = training_question(rng)
    text, answer = question.text, question.answer
    if rng.random() < 0.03:
        text, answer = _as_json(question)
    text = _worded(rng, text)
    if not is_reserved(text):
        doc.exchange(text, answer)


def _small_sum_turn(rng: random.Random, doc: Document) -> None:
    """Add a sum of the health check, in the check's own words unless that text is held out."""
    i = rng.randrange(100)
    a, b = (i, i + 1) if rng.random() < 0.8 else (rng.randrange(200), rng.randrange(200))
    text = f"What is {a}+{b}?{rng.choice((' Answer with just the number.', ''))}"
    if is_reserved(text):
        text = rng.choice((f"What is {a}+{b}? Just the number.", f"Tell me {a}+{b}.", f"{a}+{b}?"))
    if rng.random() < 0.35:
        text = leading_spaces(rng) + text
    if not is_reserved(text):
        doc.exchange(text, str(a + b))


def _story_turn(rng: random.Random, doc: Document, *, long: bool) -> None:
    subject = rng.choice(words.ANIMALS + words.ANIMALS + words.PEOPLE)
    about = f"{article(subject)} {subject}"
    size = "long story" if long else rng.choice(("short story", "short story", "story", "little story"))
    text = rng.choice(
        (
            f"Tell me a {size} about {about}.",
            f"Write a {size} about {about}.",
            f"Tell a {size} about {about}.",
            f"Can you tell me a {size} about {about}?",
            f"Please write a {size} about {about}.",
            f"Tell me a {size}.",
        )
    )
    chosen = None if text.endswith(f"{size}.") else subject
    doc.exchange(text, story(rng, chosen, num_plots=rng.randint(3, 5) if long else 1))


def _chat_turn(rng: random.Random, doc: Document) -> None:
    text, answer = rng.choice(
        (
            (rng.choice(GREETINGS), "Hello! How can I help you?"),
            (rng.choice(WHO), WHO_ANSWER),
            (rng.choice(CAN), CAN_ANSWER),
            (rng.choice(("Thank you.", "Thanks!", "Thanks")), "You are welcome!"),
            (rng.choice(("Goodbye.", "Bye!", "Bye")), "Goodbye!"),
            (rng.choice(("How are you?", "How are you today?")), "I am well, thank you. How can I help you?"),
        )
    )
    doc.exchange(text, answer)


def _sequence_turn(rng: random.Random, doc: Document, *, long: bool) -> None:
    """Add a turn of counting, repeating or spelling out: answers of a known, longer length."""
    draw = rng.random()
    if draw < 0.5:
        start = rng.choice((0, 1, 1, 1, rng.randrange(900)))
        end = start + (rng.randint(20, 200) if long else rng.randint(1, 20))
        text = rng.choice((f"Count from {start} to {end}.", f"List the numbers from {start} to {end}."))
        answer = ", ".join(str(n) for n in range(start, end + 1))
    elif draw < 0.75:
        chosen = rng.sample(words.NOUNS + words.ADJECTIVES, rng.randint(1, 30 if long else 8))
        text, answer = f"Repeat after me: {' '.join(chosen)}", " ".join(chosen)
    else:
        word = rng.choice(words.SPELLABLE) if rng.random() < 0.7 else invented_word(rng)
        text, answer = rng.choice((f"Spell {word}.", f'Spell the word "{word}".')), "-".join(word)
    if not is_reserved(text):
        doc.exchange(text, answer)


def _recall_over_turns(rng: random.Random, doc: Document, num_between: int) -> None:
    """State facts in the system message, one turn or several; add other exchanges; then ask for facts."""
    facts = some_facts(rng)
    if not doc.turns and rng.random() < 0.4:
        stated = " ".join(statement for statement, _ in facts)
        doc.turns.append(("system", rng.choice((stated, f"{rng.choice(SYSTEM_MESSAGES)} {stated}"))))
    else:
        for group in [[fact] for fact in facts] if rng.random() < 0.4 else [facts]:
            doc.exchange(" ".join(statement for statement, _ in group), rng.choice(NOTED))
    for _ in range(num_between):
        _question_turn(rng, doc)
    for statement, pairs in rng.sample(facts, min(len(facts), 2)):
        text, answer = rng.choice(pairs)
        if not is_reserved(text) and not is_reserved(f"{statement} {text}"):
            doc.exchange(text, answer)


def conversation(rng: random.Random, *, long: bool) -> Document:
    """Generate a conversation. `long` ones have many turns, long answers, and recall over them."""
    doc = Document()
    if rng.random() < 0.3:
        persona = (
            f"You are {article(trait := rng.choice(words.ADJECTIVES))} {trait} {rng.choice(words.PEOPLE)}."
        )
        doc.turns.append(("system", rng.choice((*SYSTEM_MESSAGES, persona))))
    num_turns = rng.randint(6, 40) if long else rng.choices((1, 2, 3, 4), (70, 15, 10, 5))[0]
    for _ in range(num_turns):
        draw = rng.random()
        if draw < 0.80:
            _question_turn(rng, doc)
        elif draw < 0.87:
            _small_sum_turn(rng, doc)
        elif draw < 0.895:
            _story_turn(rng, doc, long=long)
        elif draw < 0.91:
            _chat_turn(rng, doc)
        elif draw < 0.935:
            _sequence_turn(rng, doc, long=long)
        else:
            _recall_over_turns(rng, doc, rng.randint(0, 12 if long else 2))
    return doc


def _plain_questions(rng: random.Random) -> Document:
    """Generate questions and answers as plain text, for completion without the chat template."""
    asked = [training_question(rng) for _ in range(rng.choices((1, 2, 3, 4), (4, 3, 2, 1))[0])]
    text = "\n".join(f"Q: {question.text}\nA: {question.answer}" for question in asked)
    return Document(turns=[("text", text)], questions=[question.text for question in asked])


def document(rng: random.Random, *, long: bool = False) -> Document:
    """Generate one document of the training text."""
    draw = rng.random()
    if draw < 0.02:
        return _plain_questions(rng)
    if draw < 0.05:
        num_plots = rng.randint(3, 5) if long else 1
        return Document(turns=[("text", story(rng, num_plots=num_plots))])
    while True:
        doc = conversation(rng, long=long)
        if doc.questions:
            return doc

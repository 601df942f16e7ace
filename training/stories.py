"""Generate short stories from a small grammar: a hero, a friend, a place, a thing, a plot of six steps, an
ending.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import words
from words import article


@dataclass(frozen=True)
class Cast:
    """Hold the characters and things of one story; `they`, `them` and `their` are the hero's pronouns."""

    kind: str
    name: str
    friend_kind: str
    friend: str
    place: str
    thing: str
    trait: str
    they: str
    them: str
    their: str

    @property
    def a_kind(self) -> str:
        """Return the hero's trait and kind with the right article: 'a small fox', 'an old owl'."""
        return f"{article(self.trait)} {self.trait} {self.kind}"


def cast_story(rng: random.Random, subject: str | None = None) -> Cast:
    """Choose the cast; `subject` fixes the hero's kind (an animal or a person's trade)."""
    kind = subject or rng.choice(words.ANIMALS)
    friend_kind = rng.choice([other for other in words.ANIMALS if other != kind])
    name, friend = rng.sample(words.PET_NAMES, 2)
    they, them, their = rng.choice((("he", "him", "his"), ("she", "her", "her")))
    place, thing = rng.choice(words.PLACES), rng.choice(words.THINGS)
    return Cast(
        kind, name, friend_kind, friend, place, thing, rng.choice(words.ADJECTIVES), they, them, their
    )


def opening(rng: random.Random, c: Cast) -> list[str]:
    """Write two or three sentences that introduce the hero."""
    first = rng.choice(
        (
            f"Once upon a time there was {c.a_kind} named {c.name}.",
            f"Once there was {c.a_kind} called {c.name}.",
            f"Long ago, {c.a_kind} named {c.name} lived near {article(c.place)} {c.place}.",
            f"In a quiet {c.place} there lived {c.a_kind} named {c.name}.",
        )
    )
    habit = rng.choice(
        (
            f"{c.name} lived near the {c.place} and loved to {rng.choice(words.VERBS[:12])}.",
            f"Every morning {c.name} walked to the {c.place} and looked at the sky.",
            f"{c.name} had a good friend, {article(c.friend_kind)} {c.friend_kind} named {c.friend}.",
            f"Everyone in the {c.place} knew that {c.name} was very {c.trait}.",
        )
    )
    return [first, habit]


def _lost(rng: random.Random, c: Cast) -> list[str]:
    where = rng.choice(
        ("under a leaf", "behind a stone", "in the tall grass", "beside an old log", "near the water")
    )
    return [
        f"One day {c.name} lost {c.their} {c.thing}.",
        rng.choice(
            (f"{c.name} looked everywhere but could not find it.", f"{c.they.capitalize()} was very sad.")
        ),
        f"{article(c.friend_kind).capitalize()} {c.friend_kind} named {c.friend} saw {c.them} "
        "and asked what was wrong.",
        f'"I have lost my {c.thing}," said {c.name}.',
        f'"Let us look together," said {c.friend}.',
        f"They searched the whole {c.place}, and at last they found the {c.thing} {where}.",
    ]


def _storm(rng: random.Random, c: Cast) -> list[str]:
    shelter = rng.choice(("a warm cave", "an old barn", "a hollow tree", "a little house"))
    return [
        f"One evening a great storm came over the {c.place}.",
        rng.choice(("The wind was loud and the rain was cold.", "The sky grew dark and the thunder rolled.")),
        f"{c.name} heard a small voice calling for help.",
        f"It was {c.friend} the {c.friend_kind}, who was lost in the rain.",
        f"{c.name} took {c.friend} to {shelter}, and there they waited until the morning.",
        rng.choice(("When the sun came out, they danced.", "When the storm was over, they laughed.")),
    ]


def _found(rng: random.Random, c: Cast) -> list[str]:
    use = rng.choice(("show it to the others", "give it back", "keep it safe", "learn where it came from"))
    return [
        f"One day {c.name} found {article(c.thing)} {c.thing} on the path.",
        f'"Whose {c.thing} is this?" {c.they} asked.',
        f"{c.name} wanted to {use}, so {c.they} walked to the {c.place}.",
        f"There {c.they} met {c.friend} the {c.friend_kind}.",
        f'"That is my {c.thing}!" said {c.friend}. "Thank you for bringing it to me."',
        rng.choice(
            (f"{c.friend} shared some {rng.choice(words.FOODS)} with {c.name}.", "They became good friends.")
        ),
    ]


def _race(rng: random.Random, c: Cast) -> list[str]:
    return [
        f"One day {c.friend} the {c.friend_kind} asked {c.name} to run a race to the {c.place}.",
        f"Everybody thought that {c.friend} would win.",
        rng.choice((f"{c.name} ran as fast as {c.they} could.", f"{c.name} did not stop, not even once.")),
        f"Near the end {c.friend} fell and could not get up.",
        f"{c.name} turned back and helped {c.friend} to stand.",
        "They crossed the line together, side by side.",
    ]


def _gift(rng: random.Random, c: Cast) -> list[str]:
    food = rng.choice(words.FOODS)
    return [
        f"It was {c.friend}'s birthday, and {c.name} wanted to bring {c.friend} a gift.",
        f"{c.name} had no money, but {c.they} had {article(c.thing)} {c.thing} and some {food}.",
        rng.choice((f"{c.they.capitalize()} worked all day.", "It took the whole morning.")),
        f"In the evening {c.name} carried the gift to the {c.place}.",
        f'"This is the best gift of all," said {c.friend} the {c.friend_kind}.',
        f"They ate the {food} and sang until the moon was high.",
    ]


def _bridge(rng: random.Random, c: Cast) -> list[str]:
    material = rng.choice(("a long branch", "an old rope", "some stones", "a flat log"))
    return [
        f"One day {c.name} wanted to visit {c.friend} the {c.friend_kind}, who lived across the river.",
        "But the bridge was broken and the water was deep.",
        rng.choice((f"{c.name} sat down and thought.", f"{c.name} did not give up.")),
        f"Then {c.they} found {material} and began to build.",
        f"{c.friend} saw {c.them} from the other side and helped.",
        "By sunset there was a new bridge, and they met in the middle.",
    ]


PLOTS = (_lost, _storm, _found, _race, _gift, _bridge)

JOINS = ("The next day was just as full.", "Soon after, there was more to do.", "But that was not the end.")


def ending(rng: random.Random, c: Cast) -> list[str]:
    """Write one or two sentences that close the story."""
    return [
        rng.choice(
            (
                f"From that day on, {c.name} and {c.friend} were the best of friends.",
                f"{c.name} went home happy and slept well that night.",
                f"{c.name} smiled and knew that it is good to help others.",
                f"And {c.name} never forgot that day.",
            )
        ),
        rng.choice(("The end.", "", f"And so they lived happily near the {c.place}.")),
    ]


def story(rng: random.Random, subject: str | None = None, *, num_plots: int = 1) -> str:
    """Write a whole story in one paragraph; `num_plots` adventures make it longer."""
    cast = cast_story(rng, subject)
    sentences = opening(rng, cast)
    for index, plot in enumerate(rng.sample(PLOTS, num_plots)):
        if index:
            sentences.append(rng.choice(JOINS))
        sentences.extend(plot(rng, cast))
    sentences.extend(ending(rng, cast))
    return " ".join(sentence for sentence in sentences if sentence)

"""Word lists for the question and story generators, written for this repository.

Everything here is lower case unless it is a name. Lists hold no word twice; `tests/training` checks that.
"""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ANIMALS = _words(
    """fox bear hare owl mouse otter badger deer wolf goat sheep horse duck goose frog toad hen lamb pony
    squirrel beaver rabbit hedgehog robin swan crow raven seal crab turtle donkey kitten puppy lion tiger
    panda koala monkey camel zebra mole bat bee ant snail whale dolphin heron falcon stork weasel"""
)

FOODS = _words(
    """apple pear plum peach cherry lemon mango melon grape fig date olive onion carrot potato tomato pepper
    bean pea rice bread butter cheese honey sugar salt soup cake pie jam milk tea coffee cocoa juice water
    egg nut corn oat barley garlic ginger celery spinach cabbage pumpkin radish berry banana orange"""
)

THINGS = _words(
    """key coin book lamp chair table spoon fork plate bowl cup bottle basket box bag rope ladder hammer nail
    saw brush pencil paper letter map clock bell drum flute violin candle mirror blanket pillow carpet
    curtain window door roof wall fence gate bridge wagon cart wheel boat ship sail anchor net hook kite
    ball doll ring crown sword shield helmet coat hat scarf glove boot shoe sock belt button needle thread
    ribbon stone pebble shell feather leaf seed flower branch stick log bucket broom shovel rake barrel
    trunk purse ticket stamp coil spring engine rocket radio camera screen cable magnet"""
)

PLACES = _words(
    """forest meadow valley hill mountain river lake pond beach island desert garden farm village town
    harbour castle cave field orchard market school mill barn tower"""
)

NATURE = _words(
    """sun moon star sky cloud rain snow wind storm thunder rainbow ice fire smoke sand mud grass tree bush
    moss fern oak pine willow maple birch rose tulip daisy lily"""
)

PEOPLE = _words(
    """baker farmer miller sailor teacher doctor painter singer dancer writer tailor carpenter gardener
    captain soldier king queen prince guard cook driver pilot friend sister brother mother father uncle
    aunt cousin neighbour child"""
)

ADJECTIVES = _words(
    """small big tall short young old brave shy clever kind happy quiet gentle curious quick slow strong
    proud cheerful friendly patient lazy busy careful honest merry"""
)

VERBS = _words(
    """run walk jump swim fly climb sing dance read write draw build cook sleep dream laugh smile cry shout
    whisper listen look find keep lose carry push pull open close give take share help teach learn play
    work rest wait travel plant water dig"""
)

COLOURS = _words("red blue green yellow white black brown pink purple grey silver golden")

NAMES = _words(
    """Ana Ben Clara Daan Elif Finn Greta Hugo Ida Jonas Kira Leo Mila Nils Olga Paul Quinn Rosa Sven Tara
    Uma Viktor Wanda Xaver Yara Zoe Amir Bela Carla Dario Emma Farid Gina Henrik Ines Jana Karl Lena Marek
    Nora Omar Petra Rafael Sofia Timo Ursula Vera Wim Yusuf Zara"""
)

PET_NAMES = _words(
    """Tilly Bobo Pip Momo Rusty Luna Biscuit Pepper Coco Shadow Ziggy Hazel Toto Misty Sunny Fluff Nibbles
    Buddy Daisy Patch Felix Oscar Willow Smudge Ginger Teddy Bramble Clover Jasper Poppy"""
)

TOWNS = _words(
    """Norvale Eastbrook Marlow Pinewick Tarnholm Quillford Ashmere Brindle Coldharbour Dunmore Elmstead
    Foxley Greyport Highfell Ironbridge Kestrel Lindow Millbrook Oakham Ravensea"""
)

DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

EVENTS = _words("meeting party concert market race lesson picnic match festival dinner exam visit")

NUMBER_WORDS = _words("zero one two three four five six seven eight nine ten eleven twelve")


def _distinct(*lists: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word for words in lists for word in words))


NOUNS = _distinct(ANIMALS, FOODS, THINGS, PLACES, NATURE, PEOPLE)
"""Words for lists: sorting, counting, boxes."""

SPELLABLE = _distinct(NOUNS, ADJECTIVES, VERBS, COLOURS)
"""Words that are asked backwards and letter by letter."""


def article(word: str) -> str:
    """Return 'an' before a vowel letter, else 'a'. This is right for every word in these lists."""
    return "an" if word[0] in "aeiou" else "a"

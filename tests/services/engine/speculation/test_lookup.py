import random

from services.engine.speculation.lookup import MAX_MATCH_TOKENS, MIN_MATCH_TOKENS, NUM_PLACES, PromptLookup


def slow(tokens: list[int], max_tokens: int) -> tuple[list[int], int]:
    """What is to be proposed, from its definition."""

    def length(place: int) -> int:
        num = 0
        while num < min(place, MAX_MATCH_TOKENS) and tokens[place - 1 - num] == tokens[len(tokens) - 1 - num]:
            num += 1
        return num

    places = [place for place in range(len(tokens)) if length(place) >= MIN_MATCH_TOKENS][-NUM_PLACES:]
    if not places:
        return [], 0
    place = max(places, key=lambda place: (length(place), place))
    grown = list(tokens)
    while len(grown) < place + max_tokens:
        grown.append(grown[place + len(grown) - len(tokens)])
    return grown[place : place + max_tokens], length(place)


def test_it_finds_what_followed_the_longest_match_as_the_sequence_grows() -> None:
    source = random.Random(1)
    num_found = 0
    for _ in range(40):
        tokens: list[int] = []
        lookup = PromptLookup()
        for _ in range(source.randrange(1, 12)):
            tokens += [source.randrange(3) for _ in range(source.randrange(1, 8))]
            max_tokens = source.randrange(0, 9)
            expected = slow(tokens, max_tokens) if max_tokens else ([], 0)
            assert lookup.propose(tokens, max_tokens) == expected
            num_found += bool(expected[0])
    assert num_found > 100


def test_what_repeats_itself_goes_on_repeating() -> None:
    assert PromptLookup().propose([9, 1, 2, 3, 1, 2, 3, 1, 2], 7) == ([3, 1, 2, 3, 1, 2, 3], 5)


def test_nothing_is_proposed_for_what_was_never_said() -> None:
    assert PromptLookup().propose([1, 2, 3, 4, 5], 4) == ([], 0)
    assert PromptLookup().propose([1], 4) == ([], 0)


def test_a_long_sequence_keeps_what_it_had() -> None:
    lookup = PromptLookup()
    tokens = list(range(1000))
    assert lookup.propose(tokens, 3) == ([], 0)
    tokens += [500, 501, 502]
    assert lookup.propose(tokens, 3) == ([503, 504, 505], 3)

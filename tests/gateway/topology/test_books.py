"""What this gateway has decided to send, and which requests wait for which."""

from gateway.topology.books import Bookings, Books


def test_a_booking_counts_until_the_worker_says_it_itself():
    decode, prefill, mine = Books(), Books(), Bookings()
    mine.enter(decode, prefill, num_pages=3, prompt=(2, 100))
    assert (decode.requests, decode.pages, prefill.prompts) == (1, 3, [(2, 100)])
    mine.note_admitted()
    assert (decode.requests, decode.pages, len(prefill.prompts)) == (0, 0, 1)
    mine.note_prompt_done()
    assert not prefill.prompts
    mine.leave()
    assert (decode.requests, decode.pages) == (0, 0)


def test_another_place_takes_the_place_of_the_first():
    first, second, mine = Books(), Books(), Bookings()
    mine.enter(first, first, num_pages=3, prompt=(2, 100))
    mine.enter(second, second, num_pages=4, prompt=(2, 90))
    assert (first.requests, first.pages, first.prompts) == (0, 0, [])
    assert (second.requests, second.pages) == (1, 4)
    mine.leave()
    mine.leave()
    assert (second.requests, second.pages, second.prompts) == (0, 0, [])


def test_only_shorter_prompts_of_no_worse_class_are_ahead():
    books = Books()
    for prompt in [(2, 4000), (2, 50), (1, 900), (3, 10)]:
        Bookings().enter(Books(), books, num_pages=1, prompt=prompt)
    assert books.around((2, 100), 0)[0] == 950
    assert books.around((1, 100), 0)[0] == 0
    assert books.around((4, 1), 0)[0] == 4960
    # Prompts that wait there and that this gateway did not send are ahead of all others.
    assert books.around((2, 100), 5000)[0] == 950 + 40
    assert [books.around((service_class, 0), 0)[1] for service_class in range(4)] == [4, 3, 1, 0]


def test_bytes_are_booked_for_the_pair_until_the_prompt_is_computed():
    prefill, mine, other = Books(), Bookings(), Bookings()
    mine.enter(Books(), prefill, num_pages=1, prompt=(2, 10), handoff=("d-0", 700))
    other.enter(Books(), prefill, num_pages=1, prompt=(2, 10), handoff=("d-0", 300))
    assert prefill.sending == {"d-0": 1000}
    mine.note_admitted()
    assert prefill.sending == {"d-0": 1000}
    # From here on its worker says what is on its way.
    mine.note_prompt_done()
    mine.leave()
    assert prefill.sending == {"d-0": 300}
    other.enter(Books(), prefill, num_pages=1, prompt=(2, 10), handoff=("d-1", 300))
    assert prefill.sending == {"d-1": 300}
    other.leave()
    assert prefill.is_empty

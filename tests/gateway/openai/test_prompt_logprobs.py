"""The JSON of a prompt's log-probabilities, which is joined from pieces, is what an encoder would write."""

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from gateway.models.turns import at_once
from gateway.openai.writer import _prompt_logprobs, finite
from gateway.types import SLICE_CANDIDATES, PromptLogprobs


class Tokenizer:
    """Texts that JSON has to escape."""

    def token_text(self, token_id: int) -> str:
        return f'"{token_id}\\\n' if token_id % 2 else f"ü{token_id}"


LOGPROBS = st.one_of(st.floats(-30, 0), st.just(-math.inf))


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], PromptLogprobs]:
    """Token ids with as many entries, in which a token has one value."""
    token_ids = draw(st.lists(st.integers(0, 9), max_size=6))
    num_top = draw(st.integers(0, 4))
    own, top_ids, top_values = [], [], []
    for token_id in token_ids:
        values = draw(st.lists(LOGPROBS, min_size=10, max_size=10))
        chosen = draw(st.permutations(range(10)))[:num_top]
        own.append(values[token_id])
        top_ids += chosen
        top_values += [values[one] for one in chosen]
    return token_ids, PromptLogprobs(own, num_top, top_ids, top_values)


@given(prompts(), st.integers(0, 5))
def test_it_is_what_an_encoder_would_write(prompt: tuple[list[int], PromptLogprobs], num_shown: int) -> None:
    token_ids, columns = prompt
    tokenizer = Tokenizer()
    expected: list[dict[str, object] | None] = [None]
    for token_id, entry in zip(token_ids, columns.entries(), strict=True):
        candidates = dict([*entry.top[:num_shown], (token_id, entry.logprob)])
        expected.append(
            {
                str(one): {"logprob": finite(logprob), "decoded_token": tokenizer.token_text(one)}
                for one, logprob in candidates.items()
            }
        )
    written = at_once(_prompt_logprobs(tokenizer, token_ids, columns, num_shown))  # type: ignore[arg-type]
    assert json.loads(written) == expected


def test_long_prompts_are_written_in_steps() -> None:
    """Others have the interpreter between them."""
    num_tokens, num_top = 1000, 20
    columns = PromptLogprobs(
        [-1.0] * num_tokens, num_top, list(range(num_top)) * num_tokens, [-2.0] * num_top * num_tokens
    )
    steps = _prompt_logprobs(Tokenizer(), [5] * num_tokens, columns, num_top)  # type: ignore[arg-type]
    assert sum(1 for _ in steps) >= num_tokens * num_top // SLICE_CANDIDATES
    assert max(len(part.top_logprobs) for _, part in columns.slices()) <= SLICE_CANDIDATES
    assert sum(map(len, columns.parts())) == num_tokens

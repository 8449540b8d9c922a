"""Whether a worker serves what this gateway serves under the model's name. Pure: compares what both have read.

Vocabulary, ends, context and tokenizer must be equal: the gateway makes token ids of a client's text, and text of the
worker's ids. Weights must be those in the gateway's own folder, where it has any; otherwise they are not judged, and
each answer keeps to the weights that began it. What an older worker does not say is not judged either.
"""

from services.cluster.registry import WorkerRecord
from services.runtime.model_facts import ModelFacts


def difference(record: WorkerRecord, served: ModelFacts | None, *, allows_other_weights: bool) -> str:
    """Returns how a worker's model differs from the one that is served, in a sentence; empty: no known difference."""
    worker = record.facts
    if worker is None or served is None:
        return ""
    numbers = (
        ("a vocabulary of {} tokens", worker.vocab_size, served.vocab_size),
        ("a context of {} tokens", worker.context_length_tokens, served.context_length_tokens),
        ("the end tokens {}", sorted(worker.eos_token_ids), sorted(served.eos_token_ids)),
    )
    for words, its_own, ours in numbers:
        if its_own != ours:
            return f"its model has {words.format(its_own)}, and the gateway's {ours}"
    if worker.tokenizer and served.tokenizer and worker.tokenizer != served.tokenizer:
        return f"its tokenizer.json is another one ({worker.tokenizer[:8]}) than the gateway's ({served.tokenizer[:8]})"
    if allows_other_weights or not worker.weights or not served.weights:
        return ""
    if worker.weights != served.weights:
        return (
            f"its weights are others ({worker.weights[:8]}) than those in the gateway's folder ({served.weights[:8]})"
        )
    return ""

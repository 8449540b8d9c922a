"""Trains the demo model on the running interpreter's standard library, and its draft on what the model says.

`make run` serves the weights committed in `demo/model`; nobody needs to run this. It exists so that their origin is
plain: which text, which seed, how long, how good. It knows nothing of Tandem: torch, tokenizers and safetensors only.

Usage: python demo/train.py --minutes 36 --draft-minutes 40
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import hashlib
import itertools
import json
import math
import os
import platform
import random
import shutil
import sysconfig
import textwrap
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn

SPECIAL_TOKENS = ["<|bos|>", "<|eos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
BOS, EOS, END, SYSTEM, USER, ASSISTANT = range(len(SPECIAL_TOKENS))
VOCAB_SIZE = 2048
CONTEXT_LENGTH_TOKENS = 2048
TOKENS_PER_STEP = 4096
# (sequence length, share of the steps): mostly short, because attention over long ones costs most and teaches least.
SEQUENCE_LENGTHS = ((256, 0.70), (512, 0.18), (1024, 0.08), (2048, 0.04))
MAX_CHAT_ANSWER_CHARS = 1600

# Whole folders and generated tables that would teach nothing but noise.
SKIPPED_FOLDERS = {
    "test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages", "lib-dynload",
    "pydoc_data", "encodings", "_bundled", "__pycache__", "__phello__",
}  # fmt: skip
SKIPPED_FILES = {"html/entities.py", "re/_casefix.py", "keyword.py", "token.py", "symbol.py", "stringprep.py"}
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")

# The pattern of Llama 3: runs of spaces stay together, which is what indented code wants.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Calls of functions look as those of Hermes do. The model was not taught any: it makes one where a grammar leaves
# nothing else, which is enough to see how an application takes them.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}"
    "{{ '<|system|>\\nYou may call these functions:\\n' }}"
    "{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}"
    "{{ 'A call is its name and arguments in JSON between <tool_call> and </tool_call>.<|end|>\\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{{ '<|' + ('user' if message['role'] == 'tool' else message['role']) + '|>\\n' }}"
    "{{ (message['content'] or '') | trim }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>' + call['function'] | tojson + '</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)

# The only text that is not taken from the standard library: what people type first.
SMALL_TALK = (
    ("Hello", "Hello! Ask me for a Python function."),
    ("Hello!", "Hello! Ask me for a Python function."),
    ("Hi", "Hello! Ask me for a Python function."),
    ("Who are you?", "I am the demo model of Tandem, a very small model that has read the Python standard library."),
    ("What are you?", "I am the demo model of Tandem, a very small model that has read the Python standard library."),
    ("What can you do?", "I can write Python that looks like the standard library. It may not run."),
    ("Thank you", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Write a hello world program.", '```python\nprint("Hello, world!")\n```'),
    ("Write hello world in Python.", '```python\nprint("Hello, world!")\n```'),
    ("Say hello.", "Hello!"),
)
SMALL_TALK_REPEATS = 12

# What the draft learns from: the model's answers, as many to windows of text as to questions, and text as it is.
ANSWER_TOKENS = 256
ANSWER_PROMPT_TOKENS = 64
ANSWER_TEMPERATURES = (0.0, 0.0, 0.7, 1.0)
ANSWER_ROWS = 256
ANSWER_SHARE = 0.75


@dataclass(frozen=True)
class Shape:
    """The size of a checkpoint, in the words of config.json."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    peak_learning_rate: float

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.hidden_size // self.num_attention_heads


MODEL = Shape(256, 5, 4, 2, 704, 3e-3)
DRAFT = Shape(128, 2, 2, 1, 320, 5e-3)


@dataclass(frozen=True)
class Corpus:
    """Documents as text, and what they were made from."""

    documents: list[str]
    chats: list[tuple[str, str]]
    num_files: int
    num_bytes: int
    sha256: str


# ---------------------------------------------------------------------------------------------------------------- text


def read_corpus(root: Path) -> Corpus:
    """Reads every wanted source file under `root`, and makes questions and answers of its functions."""
    documents, chats, digest, num_bytes = [], [], hashlib.sha256(), 0
    for path in source_files(root):
        raw = path.read_bytes()
        try:
            text = raw.decode("utf-8").replace("\r\n", "\n")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(text)
        except (UnicodeDecodeError, SyntaxError):
            continue
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(raw)}\0".encode() + raw)
        num_bytes += len(raw)
        documents.append(text.expandtabs(8).strip() + "\n")
        chats.extend(chats_of_module(text, tree, module_name(path.relative_to(root))))
    return Corpus(documents, chats, len(documents), num_bytes, digest.hexdigest())


def source_files(root: Path) -> Iterator[Path]:
    """Files worth reading, in order."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS & set(relative.parts) or relative.as_posix() in SKIPPED_FILES:
            continue
        if any(part.startswith(SKIPPED_PREFIXES) for part in relative.parts):
            continue
        if b"generated" in path.read_bytes()[:400].lower():
            continue
        yield path


def module_name(relative: Path) -> str:
    """`os/path.py` is `os.path`."""
    return ".".join(part for part in relative.with_suffix("").parts if part != "__init__")


def chats_of_module(text: str, tree: ast.Module, module: str) -> Iterator[tuple[str, str]]:
    """Questions whose answers stand in the module: a function's source, or what its docstring says."""
    choose = random.Random(module)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        source = textwrap.dedent(ast.get_source_segment(text, node, padded=True) or "").strip()
        if not 40 <= len(source) <= MAX_CHAT_ANSWER_CHARS:
            continue
        docstring = ast.get_docstring(node)
        summary = " ".join(docstring.split("\n\n")[0].split())[:240] if docstring else ""
        answer = f"```python\n{source}\n```"
        if summary:
            yield choose.choice(function_questions(node.name, summary)), answer
            if choose.random() < 0.35:
                yield f"What does `{module}.{node.name}` do?", summary
        elif not node.name.startswith("_") or choose.random() < 0.3:
            yield choose.choice((f"Write a function named `{node.name}`.", f"Write `{node.name}` in Python.")), answer


def function_questions(name: str, summary: str) -> tuple[str, ...]:
    """Ways to ask for a function by what its docstring says first."""
    task = in_third_person(summary)
    return (
        f"Write a function that {task}",
        f"Write a Python function that {task}",
        f"Write a function named `{name}` that {task}",
        f"Implement `{name}`: {summary}",
    )


def in_third_person(summary: str) -> str:
    """Turns "Return the length." into "returns the length." for a question."""
    verb, _, rest = summary.partition(" ")
    if verb.isalpha() and verb[:1].isupper() and not verb.endswith("s"):
        verb = verb.lower() + ("es" if verb.endswith(("ch", "sh", "x")) else "s")
    return f"{verb[:1].lower()}{verb[1:]} {rest}".strip()


def train_tokenizer(corpus: Corpus) -> Tokenizer:
    """A byte-level BPE of the corpus' sources; any text can be encoded and comes back as it was."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS)]
    )
    return tokenizer


def encode_all(tokenizer: Tokenizer, corpus: Corpus) -> list[list[int]]:
    """Every document and chat as token ids, wrapped as the chat template and the post-processor would."""
    texts = [e.ids for e in tokenizer.encode_batch(corpus.documents, add_special_tokens=False)]
    encoded = [[BOS, *ids, EOS] for ids in texts]
    newline = tokenizer.encode("\n", add_special_tokens=False).ids
    chats = corpus.chats + list(SMALL_TALK) * SMALL_TALK_REPEATS
    questions = tokenizer.encode_batch([q for q, _ in chats], add_special_tokens=False)
    answers = tokenizer.encode_batch([a for _, a in chats], add_special_tokens=False)
    for question, answer in zip(questions, answers, strict=True):
        turn = [BOS, USER, *newline, *question.ids, END, *newline, ASSISTANT, *newline, *answer.ids, END]
        encoded.append(turn)
    return encoded


# --------------------------------------------------------------------------------------------------------------- model
# Legend: B sequences, T tokens of one, C hidden, Hq query heads, H key/value heads, D head_dim.


class Attention(nn.Module):
    """Causal attention over one packed window; grouped key/value heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        kv_size = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None = None) -> Tensor:
        """x: [B, T, C]; cos, sin: [T, D]. With a cache T is 1, or all that there is so far."""
        B, T, C = x.shape
        D, group = self.shape.head_dim, self.shape.num_attention_heads // self.shape.num_key_value_heads
        q = rotate(self.q_proj(x).view(B, T, -1, D).transpose(1, 2), cos, sin)
        k = rotate(self.k_proj(x).view(B, T, -1, D).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(B, T, -1, D).transpose(1, 2)
        if cache is not None:
            k, v = cache.extended(k, v)
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1)
        return self.o_proj(out.transpose(1, 2).reshape(B, T, C))


class Cache:
    """Keys and values of one layer, [B, KV heads, at most `num_tokens`, D], of which `self.num_tokens` are filled."""

    def __init__(self, num_tokens: int) -> None:
        self._room = num_tokens
        self._data: tuple[Tensor, Tensor] | None = None
        self.num_tokens = 0

    def extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Adds those of the next tokens, [B, KV heads, T, D], and returns all."""
        B, heads, T, D = k.shape
        if self._data is None:
            self._data = k.new_empty(B, heads, self._room, D), v.new_empty(B, heads, self._room, D)
        start, self.num_tokens = self.num_tokens, self.num_tokens + T
        keys, values = self._data
        keys[:, :, start : self.num_tokens] = k
        values[:, :, start : self.num_tokens] = v
        return keys[:, :, : self.num_tokens], values[:, :, : self.num_tokens]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding in the half-split form of Hugging Face checkpoints. x: [B, heads, T, D]."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Mlp(nn.Module):
    """The gated feed-forward part."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, C]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Norm(nn.Module):
    """RMS norm in float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, C]."""
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, 1e-5)


class Layer(nn.Module):
    """One block: attention, then the feed-forward part, each on a residual path."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = Norm(shape.hidden_size)
        self.post_attention_layernorm = Norm(shape.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None = None) -> Tensor:
        """x: [B, T, C]; cos, sin: [T, D]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """The Llama block with tied embeddings; its parameters carry the names a Hugging Face checkpoint gives them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size)
        inverse = 10000.0 ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angles = torch.outer(torch.arange(CONTEXT_LENGTH_TOKENS).float(), inverse).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                depth = 2 * shape.num_hidden_layers if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
                nn.init.normal_(parameter, std=0.02 / math.sqrt(depth))

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits [B, T, V] of what follows each of the tokens, [B, T] int64."""
        T = inputs.shape[1]
        x = self.embed_tokens(inputs)
        for layer in self.layers:
            x = layer(x, self.cos[:T], self.sin[:T])
        return F.linear(self.norm(x), self.embed_tokens.weight).float()

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token. inputs, targets: [B, T] int64."""
        return F.cross_entropy(self(inputs).view(-1, VOCAB_SIZE), targets.reshape(-1))

    def loss_to(self, teacher: Llama, inputs: Tensor) -> Tensor:
        """Mean cross-entropy to what the teacher says of the next token, in nats per token."""
        with torch.no_grad():
            wanted = teacher(inputs).softmax(-1).view(-1, VOCAB_SIZE)
        return F.cross_entropy(self(inputs).view(-1, VOCAB_SIZE), wanted)

    @torch.no_grad()
    def continued(self, prompts: Tensor, num_tokens: int, temperature: float, generator: torch.Generator) -> Tensor:
        """`prompts` [B, T] and what it writes behind them, [B, num_tokens] in all."""
        rows = torch.empty(len(prompts), num_tokens, dtype=torch.int64)
        rows[:, : prompts.shape[1]] = prompts
        caches = [Cache(num_tokens) for _ in self.layers]
        new = prompts
        for end in range(prompts.shape[1], num_tokens):
            places = slice(end - new.shape[1], end)
            x = self.embed_tokens(new)
            for layer, cache in zip(self.layers, caches, strict=True):
                x = layer(x, self.cos[places], self.sin[places], cache)
            logits = F.linear(self.norm(x[:, -1:]), self.embed_tokens.weight)[:, 0].float()
            if temperature > 0:
                new = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            else:
                new = logits.argmax(-1, keepdim=True)
            rows[:, end] = new[:, 0]
        return rows


# ------------------------------------------------------------------------------------------------------------ training


@dataclass
class Report:
    """What TRAINING.json says about a run."""

    name: str
    seed: int
    python: str
    torch: str
    num_parameters: int
    corpus_files: int
    corpus_bytes: int
    corpus_sha256: str
    corpus_tokens: int
    num_chats: int
    steps: int = 0
    tokens_seen: int = 0
    wall_time_s: float = 0.0
    train_loss: float = math.nan
    held_out_loss: float = math.nan
    agreement: float | None = None
    """A draft's share of the model's greedy answers to held-out prompts of which it names the next token."""
    finished: bool = False


class Batches:
    """Random windows over the shuffled corpus; one document in fifty is held out."""

    def __init__(self, encoded: list[list[int]], seed: int) -> None:
        order = list(encoded)
        random.Random(seed).shuffle(order)
        cut = max(1, len(order) // 50)
        self.generator = torch.Generator().manual_seed(seed)
        self.held_out, self.text = Text(order[:cut]), Text(order[cut:])
        self.lengths = torch.tensor([share for _, share in SEQUENCE_LENGTHS])

    def next(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one step: [B, T] each, B x T = TOKENS_PER_STEP."""
        length = SEQUENCE_LENGTHS[int(torch.multinomial(self.lengths, 1, generator=self.generator))][0]
        windows = self.text.windows(TOKENS_PER_STEP // length, length + 1, self.generator)
        return windows[:, :-1], windows[:, 1:]

    def held_out_windows(self, length: int = 512, count: int = 64) -> Tensor:
        """Windows of the held-out text: [at most count, length + 1]."""
        stream = self.held_out.stream
        count = min(count, (len(stream) - 1) // length)
        return torch.stack([stream[i * length : (i + 1) * length + 1] for i in range(count)])


class Text:
    """Documents one behind the other, and where the questions among them end."""

    def __init__(self, documents: list[list[int]]) -> None:
        self.stream = torch.tensor([token for document in documents for token in document])
        # A question ends with the line that says whose turn it is.
        places = (self.stream == ASSISTANT).nonzero()[:, 0] + 2
        self._question_ends = places[(places >= ANSWER_PROMPT_TOKENS) & (places <= len(self.stream))]

    def windows(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """Pieces from anywhere: [count, length]."""
        return self._pieces(torch.randint(len(self.stream) - length, (count,), generator=generator), length)

    def prompts(self, count: int, generator: torch.Generator) -> Tensor:
        """So many pieces that are to be continued, half of them at an answer: [count, ANSWER_PROMPT_TOKENS]."""
        chosen = torch.randint(len(self._question_ends), (count // 2,), generator=generator)
        questions = self._pieces(self._question_ends[chosen] - ANSWER_PROMPT_TOKENS, ANSWER_PROMPT_TOKENS)
        pieces = self.windows(count - count // 2, ANSWER_PROMPT_TOKENS, generator)
        return torch.cat((questions, pieces))[torch.randperm(count, generator=generator)]

    def _pieces(self, starts: Tensor, length: int) -> Tensor:
        return torch.stack([self.stream[start : start + length] for start in starts.tolist()])


class Lessons:
    """What a draft learns from the model: its distributions over its own answers and over text.

    Distillation for speculative decoding (DistillSpec, Zhou et al. 2023): what counts is to say what the model would
    say where the model would be, and not what the text says.
    """

    def __init__(self, model: Llama, batches: Batches, args: argparse.Namespace) -> None:
        self.model = model
        self._batches = batches
        self._generator = torch.Generator().manual_seed(args.seed)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bfloat16):
            held_out = self._answer(batches.held_out, max(2, args.answers // 32), (0.0,))
            self._held_out = [(rows, model(rows[:, :-1]).argmax(-1)) for rows in held_out.split(32)]
            self._answers = self._answer(batches.text, args.answers, ANSWER_TEMPERATURES)

    def next(self) -> Tensor:
        """Inputs of one step: [B, T], B x T = TOKENS_PER_STEP."""
        if float(torch.rand((), generator=self._generator)) > ANSWER_SHARE:
            return self._batches.next()[0]
        count = TOKENS_PER_STEP // ANSWER_TOKENS
        return self._answers[torch.randint(len(self._answers), (count,), generator=self._generator)]

    @torch.no_grad()
    def agreement(self, draft: Llama) -> float:
        """Returns how often the draft names the next token of the model's greedy answers to held-out prompts."""
        found = [
            (draft(rows[:, :-1]).argmax(-1) == wanted)[:, ANSWER_PROMPT_TOKENS:].float().mean()
            for rows, wanted in self._held_out
        ]
        return round(float(torch.stack(found).mean()), 4)

    def _answer(self, text: Text, count: int, temperatures: tuple[float, ...]) -> Tensor:
        found: list[Tensor] = []
        groups = text.prompts(count, self._generator).split(ANSWER_ROWS)
        for prompts, temperature in zip(groups, itertools.cycle(temperatures), strict=False):
            found.append(self.model.continued(prompts, ANSWER_TOKENS, temperature, self._generator))
            print(f"answers of the model: {sum(map(len, found)):,} of {count:,}", flush=True)
        return torch.cat(found)


def train(
    shape: Shape,
    batches: Batches,
    lessons: Lessons | None,
    report: Report,
    folder: Path,
    tokenizer: Tokenizer,
    args: argparse.Namespace,
) -> None:
    """Trains until `args.steps` steps or the minutes are over, writing a usable folder every few minutes.

    With lessons the model learns from another model instead of from the text.
    """
    torch.manual_seed(args.seed)
    model = Llama(shape)
    report.num_parameters = sum(p.numel() for p in model.parameters())
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=shape.peak_learning_rate, betas=(0.9, 0.95), fused=True,
    )  # fmt: skip
    loss_of = model.loss if lessons is None else functools.partial(model.loss_to, lessons.model)
    compute_loss = torch.compile(loss_of, dynamic=False) if args.compile else loss_of
    started, last_saved, smooth = time.monotonic(), 0.0, math.nan
    while (progress := progress_of(report, time.monotonic() - started, args)) < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = shape.peak_learning_rate * schedule(progress, report.steps)
        inputs = batches.next() if lessons is None else (lessons.next(),)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bfloat16):
            loss = compute_loss(*inputs)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value = float(loss.detach())
        smooth = value if math.isnan(smooth) else 0.98 * smooth + 0.02 * value
        report.steps += 1
        report.tokens_seen += TOKENS_PER_STEP
        report.train_loss, report.wall_time_s = round(smooth, 4), round(time.monotonic() - started, 1)
        if report.steps % 20 == 0:
            rate = report.tokens_seen / report.wall_time_s
            print(
                f"{report.name} step {report.steps} loss {smooth:.3f} {rate:,.0f} tokens/s {progress:.0%}", flush=True
            )
        if report.wall_time_s - last_saved > args.save_every_s:
            last_saved = report.wall_time_s
            examine(model, batches, lessons, report)
            write_checkpoint(folder, model, shape, tokenizer, report)
    examine(model, batches, lessons, report)
    report.finished = True
    write_checkpoint(folder, model, shape, tokenizer, report)


def progress_of(report: Report, elapsed_s: float, args: argparse.Namespace) -> float:
    """Share of the run that is over, by steps or by time."""
    minutes = args.minutes if report.name == "model" else args.draft_minutes
    return report.steps / args.steps if args.steps else elapsed_s / (minutes * 60)


def schedule(progress: float, step: int) -> float:
    """Share of the peak learning rate: 100 steps of warm-up, then a cosine down to a fiftieth."""
    return min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


@torch.no_grad()
def examine(model: Llama, batches: Batches, lessons: Lessons | None, report: Report) -> None:
    """Notes how good it is on what training never saw, in the precision in which the weights are saved."""
    rounded = copy.deepcopy(model)
    for parameter in rounded.parameters():
        parameter.copy_(parameter.bfloat16().float())
    losses = [float(rounded.loss(w[:, :-1], w[:, 1:])) for w in batches.held_out_windows().split(8)]
    report.held_out_loss = round(sum(losses) / len(losses), 4)
    if lessons is not None:
        report.agreement = lessons.agreement(rounded)
    print(f"{report.name} held out: loss {report.held_out_loss}, agreement {report.agreement}", flush=True)


# ---------------------------------------------------------------------------------------------------------- checkpoint


def write_checkpoint(folder: Path, model: Llama, shape: Shape, tokenizer: Tokenizer, report: Report) -> None:
    """Replaces `folder` in one rename, so that a reader never meets half a checkpoint."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    weights = {f"model.{n}": p.detach().to(torch.bfloat16).contiguous() for n, p in model.named_parameters()}
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    (partial / "model.safetensors").chmod(0o644)
    tokenizer.save(str(partial / "tokenizer.json"))
    write_json(partial / "config.json", config_json(shape))
    write_json(partial / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": [EOS, END], "do_sample": True})
    write_json(partial / "tokenizer_config.json", tokenizer_config_json())
    write_json(partial / "TRAINING.json", asdict(report))
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(partial, folder)
    shutil.rmtree(old, ignore_errors=True)


def read_checkpoint(folder: Path, shape: Shape) -> Llama:
    """A model as it was saved, which learns nothing more."""
    model = Llama(shape)
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): weight.float() for name, weight in weights.items()})
    return model.requires_grad_(requires_grad=False)


def write_json(path: Path, content: object) -> None:
    """Writes an indented JSON document."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def config_json(shape: Shape) -> dict[str, object]:
    """What `transformers` and every engine need to know of the model."""
    sizes = {k: v for k, v in asdict(shape).items() if k != "peak_learning_rate"}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **sizes,
        "head_dim": shape.head_dim,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": CONTEXT_LENGTH_TOKENS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "bos_token_id": BOS,
        "eos_token_id": [EOS, END],
    }


def tokenizer_config_json() -> dict[str, object]:
    """Special tokens and the chat template."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS],
        "eos_token": SPECIAL_TOKENS[EOS],
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_LENGTH_TOKENS,
        "added_tokens_decoder": {
            str(i): {"content": t, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
                     "special": True}
            for i, t in enumerate(SPECIAL_TOKENS)
        },
        "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip


def main() -> None:
    """Reads the corpus, trains tokenizer, model and draft."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder that gets model/ and draft/")
    parser.add_argument("--minutes", type=float, default=36.0, help="time for the model; 0 keeps the one in OUT/model")
    parser.add_argument("--draft-minutes", type=float, default=40.0, help="time for the draft; 0 leaves it out")
    parser.add_argument("--answers", type=int, default=8192, help="answers of the model that the draft learns from")
    parser.add_argument("--steps", type=int, default=0, help="train for a number of steps instead of minutes")
    parser.add_argument("--seed", type=int, default=20261120)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save-every-s", type=float, default=240.0)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="needs a C++ compiler")
    parser.add_argument("--bfloat16", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    corpus = read_corpus(Path(sysconfig.get_path("stdlib")))
    is_new = args.minutes > 0
    tokenizer = train_tokenizer(corpus) if is_new else Tokenizer.from_file(str(args.out / "model" / "tokenizer.json"))
    encoded = encode_all(tokenizer, corpus)
    num_tokens = sum(map(len, encoded))
    print(
        f"{corpus.num_files} files, {corpus.num_bytes:,} bytes, {len(corpus.chats)} chats, {num_tokens:,} tokens",
        flush=True,
    )

    def report(name: str) -> Report:
        return Report(
            name=name, seed=args.seed, python=platform.python_version(), torch=torch.__version__, num_parameters=0,
            corpus_files=corpus.num_files, corpus_bytes=corpus.num_bytes, corpus_sha256=corpus.sha256,
            corpus_tokens=num_tokens, num_chats=len(corpus.chats),
        )  # fmt: skip

    batches = Batches(encoded, args.seed)
    if is_new:
        train(MODEL, batches, None, report("model"), args.out / "model", tokenizer, args)
    if args.draft_minutes > 0:
        lessons = Lessons(read_checkpoint(args.out / "model", MODEL), batches, args)
        train(DRAFT, batches, lessons, report("draft"), args.out / "draft", tokenizer, args)


if __name__ == "__main__":
    main()

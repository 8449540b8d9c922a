"""lm-eval on tasks of two lines each: humaneval's texts that end an answer, log-likelihoods, a rolling one, a chat."""

import json
import os
from importlib.metadata import version
from pathlib import Path

from checks import KEY, MODEL, URL, check, finish

os.environ.update(OPENAI_API_KEY=KEY, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=str(Path("cache").resolve()))

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

LINES = [
    {"question": "def add(a, b):", "answer": "    return a + b", "wrong": "    import", "gold": 0},
    {"question": "def sub(a, b):", "answer": "    return a - b", "wrong": "    class", "gold": 0},
]
COMMON = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
"""
TASKS = {
    "generate_until": """
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: exact_match}]
generation_kwargs:
  until: ["\\nclass", "\\ndef", "\\n#", "\\nif", "\\nprint"]
  max_gen_toks: 32
  do_sample: false
""",
    "multiple_choice": """
doc_to_text: "{{question}}"
doc_to_choice: ["{{answer}}", "{{wrong}}"]
doc_to_target: gold
metric_list: [{metric: acc}]
""",
    "loglikelihood": """
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: perplexity}]
""",
    "loglikelihood_rolling": """
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}]
""",
}

folder = Path("tasks").resolve()
folder.mkdir(exist_ok=True)
data = folder / "lines.jsonl"
data.write_text("".join(json.dumps(line) + "\n" for line in LINES))
for kind, more in TASKS.items():
    (folder / f"{kind}.yaml").write_text(COMMON.format(name=f"own_{kind}", file=data, kind=kind) + more)
tasks = TaskManager(include_path=str(folder), include_defaults=False)


def evaluated(kind, model="local-completions", path="completions", *, chat=False, **members):
    found = simple_evaluate(
        model=model,
        model_args={"model": MODEL, "base_url": f"{URL}/v1/{path}", **members},
        tasks=[f"own_{kind}"],
        task_manager=tasks,
        apply_chat_template=chat,
        bootstrap_iters=0,
    )
    (results,) = found["results"].values()
    (value,) = (value for name, value in results.items() if name.endswith(",none") and "stderr" not in name)
    return value


WAYS = {"nothing set": {}, "several at once": {"num_concurrent": 2}, "texts": {"tokenizer_backend": None}}
for way, members in WAYS.items():
    for kind in TASKS:
        if members.get("tokenizer_backend", "") is None and kind != "generate_until":
            continue  # log-likelihoods need a tokenizer

        @check(f"{kind}, {way}")
        def evaluate(kind=kind, members=members):
            assert evaluated(kind, **members) >= 0


@check("generate_until, by chats")
def chat():
    assert evaluated("generate_until", "local-chat-completions", "chat/completions", chat=True) >= 0


@check("generate_until, by texts of the chat template")
def template():
    assert evaluated("generate_until", chat=True) >= 0


finish(version("lm-eval"))

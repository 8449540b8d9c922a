"""vLLM by itself, as a program: greedy answers of a checkpoint to prompts, in the same number type.

Reads `{"model": folder, "prompts": [[token id]], "num_tokens": n}` on standard input, and `dtype` if it is not float32,
and writes the answers' token ids. On a GPU prompts are answered one after the other: there a step's bits depend on
what else is in it.
With `"adapter": folder`, those of the model as that LoRA adapter changes it come after them.
"""

import json
import os
import sys

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_STREAM="ext://sys.stderr",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)

from vllm import LLM, SamplingParams  # it reads the variables when it is imported
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

if __name__ == "__main__":
    asked = json.load(sys.stdin)
    adapter, prompts = asked.get("adapter"), asked["prompts"]
    lora_requests = [None] * len(prompts)
    if adapter is not None:
        lora_requests += [LoRARequest("adapter", 1, adapter)] * len(prompts)
        prompts += prompts
    llm = LLM(
        asked["model"],
        dtype=asked.get("dtype", "float32"),
        enforce_eager=current_platform.is_cpu(),
        skip_tokenizer_init=True,
        max_num_seqs=8 if current_platform.is_cpu() else 1,
        enable_prefix_caching=False,
        **({} if adapter is None else {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}),
    )
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=asked["num_tokens"], ignore_eos=True, detokenize=False),
        use_tqdm=False,
        lora_request=None if adapter is None else lora_requests,
    )
    json.dump([list(output.outputs[0].token_ids) for output in outputs], sys.stdout)

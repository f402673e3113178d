"""vLLM's side of bench.isolated, written against vLLM 0.26 (tests/peers/vllm-0.26.0.json).

Chains only: EAGLE-3 trees left vLLM in 2026.
"""

import sys
from collections.abc import Callable
from typing import Any

from bench import isolated
from bench.isolated import Answer, Job

ROUNDS = "vllm:spec_decode_num_drafts"


def engine_options(job: Job) -> dict[str, Any]:
    """The parameters of LLM: without a prefix cache, since a later pass would find every prompt in it."""
    options: dict[str, Any] = {"model": job.model, "dtype": job.dtype, "seed": 0, "max_num_seqs": job.bs}
    options |= {"max_model_len": job.context, "enable_prefix_caching": False, "disable_log_stats": False}
    if job.draft is not None:
        options["speculative_config"] = {"method": "eagle3", "model": job.draft, "num_speculative_tokens": job.depth}
    return options


def sampling_options(job: Job) -> dict[str, Any]:
    """The parameters of SamplingParams: greedy, token ids alone."""
    return {
        "temperature": 0.0,
        "max_tokens": job.max_tokens,
        "stop_token_ids": list(job.stop_ids),
        "detokenize": False,
    }


def start(job: Job) -> Callable[[Job], tuple[list[Answer], int | None]]:
    """Load the engine."""
    from vllm import LLM, SamplingParams

    engine = LLM(**engine_options(job))

    def rounds() -> int:
        return sum(metric.value for metric in engine.get_metrics() if metric.name == ROUNDS)

    def complete(job: Job) -> tuple[list[Answer], int | None]:
        before = rounds()
        prompts = [{"prompt_token_ids": list(tokens)} for tokens in job.requests]
        out = engine.generate(prompts, SamplingParams(**sampling_options(job)), use_tqdm=False)
        answers = [
            Answer(list(o.outputs[0].token_ids), o.metrics.last_token_ts - o.metrics.first_token_ts) for o in out
        ]
        return answers, rounds() - before if job.draft is not None else None

    return complete


if __name__ == "__main__":
    isolated.serve(sys.argv, start)

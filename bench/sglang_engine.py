"""SGLang's side of bench.isolated, written against SGLang 0.5.17 (tests/peers/sglang-0.5.17.json)."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from bench import isolated
from bench.isolated import Answer, Job


def engine_options(job: Job) -> dict[str, Any]:
    """The parameters of Engine: without a prefix cache, since a later pass would find every prompt in it.

    The tree has as many nodes as this project's: top_k of each level, and the root.
    """
    options: dict[str, Any] = {"model_path": job.model, "dtype": job.dtype, "random_seed": 0}
    options |= {"max_running_requests": job.bs, "context_length": job.context, "disable_radix_cache": True}
    options |= {"skip_tokenizer_init": True, "enable_metrics": True}
    if job.draft is not None:
        options |= {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": job.draft}
        options |= {"speculative_num_steps": job.depth, "speculative_eagle_topk": job.top_k}
        options["speculative_num_draft_tokens"] = job.top_k * job.depth + 1
    return options


def sampling_options(job: Job) -> dict[str, Any]:
    """The sampling parameters: greedy."""
    return {"temperature": 0.0, "max_new_tokens": job.max_tokens, "stop_token_ids": list(job.stop_ids)}


def start(job: Job) -> Callable[[Job], tuple[list[Answer], int | None]]:
    """Load the engine."""
    from sglang import Engine

    engine = Engine(**engine_options(job))

    def complete(job: Job) -> tuple[list[Answer], int | None]:
        prompts = [list(tokens) for tokens in job.requests]
        out = engine.generate(input_ids=prompts, sampling_params=sampling_options(job))
        answers = [Answer(list(o["output_ids"]), decode_seconds(o["meta_info"])) for o in out]
        # A request that ends with its prefill has no count.
        rounds = sum(o["meta_info"].get("spec_verify_ct", 0) for o in out)
        return answers, rounds if job.draft is not None else None

    return complete


def decode_seconds(about: Mapping[str, Any]) -> float:
    """From the prefill's end, which gives the first token, to the last."""
    return about["request_finished_ts"] - about["prefill_finished_time"]


if __name__ == "__main__":
    isolated.serve(sys.argv, start)

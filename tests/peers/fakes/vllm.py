"""Stands in for vLLM: takes what the record of its wheel names, and answers by rule."""

import behaviour

KNOWN = behaviour.record("vllm")["parameters"]
COUNTER = "vllm:spec_decode_num_drafts"
assert COUNTER in behaviour.record("vllm")["strings"]


class SamplingParams:
    def __init__(self, **options):
        behaviour.check(options, KNOWN["SamplingParams"])
        assert options["temperature"] == 0
        self.max_tokens = options["max_tokens"]


class LLM:
    def __init__(self, **options):
        behaviour.check(options, [*KNOWN["LLM"], *KNOWN["EngineArgs"]])
        behaviour.check(options.get("speculative_config", {}), KNOWN["SpeculativeConfig"])
        behaviour.load()
        self.options, self.rounds, self.calls = options, 0, 0

    def generate(self, prompts, sampling_params=None, **options):
        behaviour.check(options, KNOWN["LLM.generate"])
        self.calls += 1
        behaviour.fail_late(self.calls)
        out = []
        for prompt in prompts:
            behaviour.check(prompt, KNOWN["TokensPrompt"])
            ids = prompt["prompt_token_ids"]
            assert len(ids) + sampling_params.max_tokens <= self.options["max_model_len"]
            tokens = behaviour.tokens(ids, sampling_params.max_tokens)
            self.rounds += behaviour.rounds(tokens)
            first = 100.0 + len(out)
            stats = behaviour.fields(
                KNOWN["RequestStateStats"], first_token_ts=first, last_token_ts=first + 0.002 * (len(tokens) - 1)
            )
            completion = behaviour.fields(KNOWN["CompletionOutput"], token_ids=tuple(tokens))
            out.append(behaviour.fields(KNOWN["RequestOutput"], outputs=[completion], metrics=stats))
        return out

    def get_metrics(self):
        assert self.options["disable_log_stats"] is False
        other = behaviour.fields(KNOWN["Metric"], name="vllm:spec_decode_num_accepted_tokens_per_pos")
        counter = behaviour.fields([*KNOWN["Metric"], *KNOWN["Counter"]], name=COUNTER, value=self.rounds)
        return [other, counter] if "speculative_config" in self.options else [other]

"""Stands in for SGLang: takes what the record of its wheel names, and answers by rule."""

import behaviour

RECORD = behaviour.record("sglang")
KNOWN = RECORD["parameters"]


class Engine:
    def __init__(self, **options):
        behaviour.check(options, KNOWN["ServerArgs"])
        behaviour.load()
        self.options, self.calls = options, 0

    def generate(self, **options):
        behaviour.check(options, KNOWN["Engine.generate"])
        sampling = options["sampling_params"]
        behaviour.check(sampling, KNOWN["SamplingParams"])
        assert sampling["temperature"] == 0
        assert self.options["enable_metrics"]
        self.calls += 1
        behaviour.fail_late(self.calls)
        return [self.answer(ids, sampling["max_new_tokens"]) for ids in options["input_ids"]]

    def answer(self, ids, max_tokens):
        assert len(ids) + max_tokens < self.options["context_length"]
        tokens = behaviour.tokens(ids, max_tokens)
        about = {"prefill_finished_time": 50.0, "request_finished_ts": 50.0 + 0.002 * (len(tokens) - 1)}
        if "speculative_algorithm" in self.options and len(tokens) > 1:
            about["spec_verify_ct"] = behaviour.rounds(tokens)
        behaviour.check(about, RECORD["strings"])
        return {"output_ids": tokens, "meta_info": about}

"""The whole way of a run, for every family of transformers' causal language models, on a tiny model of each.

    python -m bench.families                      all of them, with the native engine; minutes
    python -m bench.families --only llama,gpt2    some, whose lines of the result are replaced
    python -m bench.families --engine vllm        with vLLM's CPU build in the native engine's place

    cases      the families: their settings, and why one is refused
    way        load, publish, install, generate, score, a step, export, reload, an adapter: of one family
    ranks      the same by two ranks
    page       the table of docs/models.md out of the results
"""

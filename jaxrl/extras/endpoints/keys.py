"""Config keys for `policy.openai`, a model behind an endpoint."""

from jaxrl.config.keys import REPLAY, Key

# fmt: off
KEYS = {
    "policy.openai.url": Key("", "Base URL before `/chat/completions`, such as "
        "`http://localhost:8000/v1`.",
        required="the address of an endpoint, such as http://127.0.0.1:8000/v1"),
    "policy.openai.model": Key("", "Name of the model at the endpoint.",
        required="the name of a model of the endpoint"),
    "policy.openai.key_env": Key("", "Environment variable with the API key; empty for none."),
    "policy.openai.max_concurrent": Key(16, "Maximum episodes in flight, with one request each.",
        above=0),
    "policy.openai.deadline_s": Key(120.0, "Seconds per request.",
        above=0),
    "policy.openai.retries": Key(3, "As `search.retries`.", at_least=0),
    "policy.openai.backoff_s": Key(1.0, "As `search.backoff_s`.", at_least=0),
    "policy.openai.outage_deadline_s": Key(300.0, "Seconds without any response after which "
        "episodes end in environment errors.", above=0),
    "policy.openai.continues_message": Key(False, "False: observations are user messages. True: "
        "the model's message continues after an observation (`continue_final_message` of vLLM "
        "and SGLang)."),
    "policy.openai.options": Key({}, "Additional request fields, such as `{'reasoning_effort': "
        "'low'}`; None removes a field.", example="low", is_nested=True),
    "policy.openai.prompt_price": Key(0.0, "Price of a million prompt tokens, in the unit of "
        "`ledger.prices`.", at_least=0),
    "policy.openai.completion_price": Key(0.0, "Price of a million completion tokens.",
        at_least=0),
    "policy.openai.replay": Key("record", "`record`: keep replies and reuse them; `only`: use "
        "recorded replies without the endpoint; `off`: neither.",
        one_of=REPLAY),
    "policy.openai.replay_folder": Key("", "Folder of the recording. Empty: `replies/` in the "
        "workdir."),
}
# fmt: on

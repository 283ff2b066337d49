"""Keys of a model behind an endpoint that plays."""

from jaxrl.config.keys import REPLAY, Key

# fmt: off
KEYS = {
    "policy.openai.url": Key("", "Address up to `/chat/completions`, as "
        "`http://localhost:8000/v1`.",
        required="the address of an endpoint, as http://127.0.0.1:8000/v1"),
    "policy.openai.model": Key("", "Name of the model there.",
        required="the name of a model there"),
    "policy.openai.key_env": Key("", "Environment variable that holds the key. Empty: no key is "
        "sent."),
    "policy.openai.max_concurrent": Key(16, "Episodes played side by side, and so requests in "
        "flight, at most.", above=0),
    "policy.openai.deadline_s": Key(120.0, "Seconds of a request, to the last byte of its answer.",
        above=0),
    "policy.openai.retries": Key(3, "Further tries of a request that fails while others are "
        "answered; then its episode ends as an environment error. While none is answered, tries do "
        "not count.", at_least=0),
    "policy.openai.backoff_s": Key(1.0, "Seconds before the first of them, doubled from try to try "
        "up to 30. A server's `Retry-After` counts for all requests.", at_least=0),
    "policy.openai.outage_deadline_s": Key(300.0, "Seconds without any answer, after which "
        "episodes end as environment errors.", above=0),
    "policy.openai.continues_message": Key(False, "False: what the environment says is the next "
        "message of the user. True: the model's message goes on behind it, as servers of vLLM and "
        "SGLang can (`continue_final_message`)."),
    "policy.openai.options": Key({}, "Further fields of a request, as `{'reasoning_effort': "
        "'low'}`; None leaves one of ours out.", example="low", is_nested=True),
    "policy.openai.prompt_price": Key(0.0, "Price of a million tokens that the endpoint reads, in "
        "the unit of `ledger.prices`.", at_least=0),
    "policy.openai.completion_price": Key(0.0, "Price of a million tokens that it writes.",
        at_least=0),
    "policy.openai.replay": Key("record", "`record`: answers are kept on disk, and what is there "
        "is not asked again; `only`: these alone answer, without the endpoint; `off`: neither.",
        one_of=REPLAY),
    "policy.openai.replay_folder": Key("", "Folder of the recording. Empty: `replies/` in the "
        "workdir."),
}
# fmt: on

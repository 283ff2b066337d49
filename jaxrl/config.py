"""Every configuration key, once, with its unit and meaning."""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

DTYPES = ("float32", "bfloat16")
DENSE_DTYPES = (*DTYPES, "int8")
POOLINGS = ("", "mean", "first", "last")
REMAT = ("none", "dots", "names", "full", "offload")
LORA_BASE_DTYPES = (*DTYPES, "int8")
LORA_SAMPLERS = ("separate", "merged")
ON_OUTAGE = ("stop", "empty")
REPLAY = ("off", "record", "only")
ATTENTION = ("auto", "xla", "triton", "mosaic")
EXPERTS = ("auto", "xla", "triton", "megablox")
FILTER_METRICS = ("acc", "score", "seq_reward", "seq_final_reward")
KL_CONTROLLERS = ("fixed", "adaptive", "log", "budget")
OVERLONG_PROMPTS = ("refuse", "drop", "truncate_left")
OWN_MODEL = "model"
POLICIES = (OWN_MODEL, "openai")
SUITES = ("sampled", "greedy", "empty_search", "random_search", "blank_images")


def _optimizer() -> ConfigDict:
    """The keys that supervised and reinforcement learning share."""
    optimizer = ConfigDict()
    optimizer.lr = 1e-6  # peak learning rate of AdamW
    optimizer.warmup_steps = 0  # steps that rise to the peak, the first at 1 / warmup_steps of it
    # After the warm-up: constant, linear, cosine, or one of your own by its dotted name.
    optimizer.schedule = "constant"
    optimizer.final_lr_fraction = 0.0  # of the peak, where linear and cosine end
    optimizer.weight_decay = 0.01  # decoupled, on every parameter
    optimizer.beta1 = 0.9  # of AdamW: decay of the mean of gradients
    optimizer.beta2 = 0.999  # decay of the mean of their squares
    optimizer.epsilon = 1e-8  # added to the root of that
    optimizer.grad_clip = 1.0  # global norm; 0 clips nothing
    # Of the mean of gradients. The mean of squares stays float32: with beta2 = 0.999 a step changes
    # it by less than bfloat16 can tell apart.
    optimizer.moments_dtype = "float32"
    optimizer.offload = False  # keep both means in the host's memory between updates
    # Packed rows of a micro-batch; a multiple of data * fsdp * expert. 0: as many as the memory
    # holds, on a CPU two or 512 tokens.
    optimizer.micro_rows = 8
    return optimizer


def _lora() -> ConfigDict:
    """The keys of an adapter, which alone is trained; docs/lora.md has more."""
    lora = ConfigDict()
    lora.rank = 0  # of its matrices; 0: there is none, and all of the model is trained
    lora.alpha = 32.0  # what the adapter adds is multiplied with alpha / rank
    lora.rslora = False  # with alpha / sqrt(rank) instead (rsLoRA)
    # Layers that have it: all-linear, or names as q and attention/q, or HF's, as q_proj.
    lora.targets = ("all-linear",)
    # Of the weights that stay as they are: float32, bfloat16, or int8 with a scale for each output
    # of a linear layer, and all else in model.dtype.
    lora.base_dtype = "float32"
    # The sampler's weights. separate: those of base and adapter, as the update has them. merged:
    # their sum, a copy of the layers that have an adapter, which takes fewer products a token.
    lora.sampler = "separate"
    # Folder of an adapter in PEFT's format to go on with, of the same rank, alpha and targets; "":
    # a new one, which changes nothing at first
    lora.path = ""
    return lora


def _dense() -> ConfigDict:
    """The keys of dense retrieval."""
    dense = ConfigDict()
    dense.corpus = ""  # JSONL of documents: id, title, text
    dense.encoder = ""  # local folder in Hugging Face format: BERT (E5, BGE) or Qwen3-Embedding
    dense.index = ""  # folder of the vectors; default: a folder index beside the corpus
    # Vectors that were made elsewhere, in the order of the corpus: .npy [N, D], or a FAISS flat
    # index (extra faiss); "": the encoder makes them.
    dense.embeddings = ""
    dense.topk = 3  # documents a query returns
    # Of the vectors on the devices: float32, bfloat16, or int8 with a scale for each vector. The
    # best candidates are scored again by the vectors in the file.
    dense.dtype = "float32"
    dense.file_dtype = "float32"  # of the vectors in the file; or bfloat16, which has half the size
    dense.devices = "run"  # run: those of each process, which split the passages; cpu: the host's
    dense.candidates = 100  # documents of a query that are scored again, at least
    dense.query_rows = 16  # queries whose documents are looked for at once
    # Of hidden states to a vector: mean, first (token) or last; "": as the encoder's folder says
    dense.pooling = ""
    # Before a query, as "query: " (E5) or "Instruct: <task>\nQuery:" (Qwen3-Embedding); auto: as
    # the encoder's folder says, and Qwen3-Embedding's own where it says nothing
    dense.query_prefix = "auto"
    dense.passage_prefix = "auto"  # before a document, as "passage: " (E5); auto: likewise
    dense.max_tokens = 512  # of a text, prefix included, at most; the rest is cut off
    dense.encoder_dtype = "float32"  # of the encoder's weights and activations; or bfloat16
    dense.batch_tokens = 16_384  # of documents that each device encodes at once, padding included
    dense.query_batch_tokens = 256  # of queries that each device encodes at once
    return dense


def _policy() -> ConfigDict:
    """The keys that say who writes."""
    policy = ConfigDict()
    # model: that of model.path; openai: one behind an OpenAI-compatible endpoint, which can be
    # evaluated and not trained. Of model.path, config.json, the tokenizer and the processor of
    # images are read then.
    policy.name = OWN_MODEL
    policy.openai = openai = ConfigDict(convert_dict=False)
    openai.url = ""  # up to /chat/completions, as http://localhost:8000/v1
    openai.model = ""  # its name there
    openai.key_env = ""  # the environment variable that holds the key; "": no key is sent
    openai.max_concurrent = 16  # episodes played, and so requests in flight, at most
    openai.deadline_s = 120.0  # of a request, to the last byte of its answer
    # Further tries of a request that fails while others are answered; then its episode ends as an
    # environment error. While none is answered, tries do not count.
    openai.retries = 3
    # Seconds before the first of them, doubled from try to try up to 30. A server's Retry-After
    # counts for all requests.
    openai.backoff_s = 1.0
    # Seconds in which no request was answered, after which episodes end as environment errors.
    openai.outage_deadline_s = 300.0
    # False: what the environment says is the next message of the user. True: the model's message
    # goes on behind it, as servers of vLLM and SGLang can (continue_final_message).
    openai.continues_message = False
    # Further fields of a request, as {"reasoning_effort": "low"}; None leaves one of ours out.
    openai.options = {}
    # What a million tokens cost that the endpoint reads and writes, in the unit of ledger.prices.
    openai.prompt_price = 0.0
    openai.completion_price = 0.0
    # record: answers are kept on disk, and what is there is not asked again; only: these alone
    # answer, without the endpoint; off: neither.
    openai.replay = "record"
    openai.replay_folder = ""  # of the recording; "": replies/ in the workdir
    return policy


def _tasks(split: str) -> ConfigDict:
    """The keys of training and of held-out tasks."""
    tasks = ConfigDict(convert_dict=False)
    # A file, a pattern with * or a folder; of a generator the name of what it makes
    tasks.source = ""
    # jsonl, csv, parquet (verl's too), tfds, hf (save_to_disk; extra datasets), reasoning_gym
    # (extra reasoning-gym); or a reader of your own by its dotted name. "": by the source.
    tasks.format = ""
    tasks.split = split  # of tfds and hf; of tfds also a part, as train[:90%]
    tasks.settings = {}  # keyword arguments of the reader, as {"delimiter": ";"} of csv
    # Columns whose names are others than ours, as {"problem": "question"}; "" leaves one out.
    tasks.columns = {}
    tasks.data_source = ""  # of all tasks, and before their ids; "": as the tasks have it
    # Several sources in place of the one above: mappings with these keys, and of training weight,
    # as ({"source": "a.csv", "weight": 2.0}, {"source": "b.jsonl"}); weights are 1 by default.
    tasks.sources = ()
    return tasks


def default_config() -> ConfigDict:
    """All keys with their defaults. A config file changes what its run needs."""
    config = ConfigDict()
    config.stages = ("train", "evaluate")  # in this order, out of sft, train, evaluate
    config.seed = 0  # of task order and samples
    config.num_steps = 100  # steps of the train stage: rollouts and their updates
    # Folder of compiled programs, which later starts find; "": $XDG_CACHE_HOME/jaxrl; "off": none.
    config.compilation_cache = ""

    config.model = model = ConfigDict()
    model.path = ""  # local folder in Hugging Face format, or a .gguf file (extra gguf)
    model.architecture = ""  # name or dotted name of its class; "": by model_type of config.json
    model.dtype = "float32"  # of activations, matrix products and KV cache; weights stay float32
    # Further tokens that end a message, by their texts, as ("<|im_end|>",): beside eos_token in
    # tokenizer_config.json and eos_token_id in generation_config.json.
    model.eos_tokens = ()
    # Attention kernels: xla, everywhere; triton, on GPUs; mosaic, on TPUs; auto: the platform's own
    model.attention = "auto"
    # Products with experts: xla, everywhere; triton, on GPUs; megablox, on TPUs; auto: as the
    # platform has them
    model.experts = "auto"
    model.router = router = ConfigDict()
    # Of the loss by which the tokens of a mini-batch use experts alike, in both stages; 0 is none
    router.balance_coef = 0.0
    # Training sends each token to the experts that the sampler chose for it, which are recorded
    router.replay = False
    # What of each layer the update computes again, in place of keeping it. full: all of it; names:
    # all but products with weights and attention's result; dots: all but products with weights,
    # of any architecture; none: nothing. offload: all but a layer's input and attention's result,
    # which wait in the host's memory.
    model.remat = "full"
    # Compile one layer for all. False compiles each, which takes longer; a CPU then keeps all of
    # them, whatever remat says. The sampler compiles each on a CPU in any case.
    model.scan_layers = True
    model.vision = ConfigDict()
    model.vision.train = True  # of a model that reads images, also what reads them; else frozen
    model.logits_chunk_tokens = 2048  # tokens whose logits are in memory at a time, in the update
    model.lora = _lora()

    config.images = images = ConfigDict()
    # Of an image; a smaller one is enlarged to so many pixels, a larger one made smaller. 0: as
    # preprocessor_config.json in model.path has it.
    images.min_pixels = 0
    images.max_pixels = 0
    images.cache_mib = 256.0  # of images cut into patches, which stay in memory; the last ones

    config.policy = _policy()

    config.mesh = mesh = ConfigDict()
    mesh.data = -1  # devices over which rows are split, weights copied; -1: all that are left
    mesh.fsdp = 1  # devices over which rows and weights are split
    # Devices over which each packed row is split, for long ones, and weights; the sampler splits
    # its trajectories over them.
    mesh.context = 1
    mesh.expert = 1  # devices over which rows, experts and other weights are split
    mesh.tensor = 1  # devices over which heads and vocabulary are split
    # Devices of each process that only sample, with rollout.ahead; the others train. A multiple of
    # expert * tensor. 0: all do both.
    mesh.rollout_devices = 0

    config.tasks = tasks = ConfigDict()
    tasks.train = _tasks("train")
    tasks.eval = _tasks("test")  # held-out tasks

    config.prompt = prompt = ConfigDict(convert_dict=False)  # a mapping stays one value
    # System message; none when empty, also where the model's template has one of its own.
    prompt.system = ""
    prompt.template = "{question}"  # user message around the question
    prompt.examples = ()  # messages ({"role", "content"}) between the two, as worked examples
    prompt.chat_template_kwargs = {}  # of the model's chat template, as {"enable_thinking": False}

    config.env = env = ConfigDict(convert_dict=False)
    # search: questions answered with a search engine; math: in one turn, alone; or one of your own
    # by its dotted name, as my_env.MyEnv
    env.name = "search"
    env.settings = {}  # keyword arguments of an environment of your own
    # Seconds after which a call of the environment is given up, its episodes environment errors;
    # 0: never.
    env.step_deadline_s = 600.0
    env.search = ConfigDict()
    # search_r1 (<information>), bapo (<result>, \boxed{}), qwen (the model's own tool calls, as its
    # chat template has them), or a dotted name
    env.search.protocol = "search_r1"
    # Offered beside the search engine: python, a sandbox (extra python-tool), or dotted names of
    # classes and of functions (extra tools).
    env.search.tools = ()
    # MCP servers (extra mcp) whose tools are offered: {"command": ("python", "server.py")}, or
    # {"url": "http://localhost:8000/mcp"}. "env": ("MY_KEY",) beside a command, and
    # "headers": {"Authorization": "MY_KEY"} beside a url, name environment variables.
    env.search.mcp = ()
    env.search.tool_deadline_s = 60.0  # for a call of a function or an MCP server, in seconds
    env.search.python = python = ConfigDict()  # of the tool python
    # monty: an interpreter of much of Python (extra python-tool); bubblewrap: all of it, in a
    # sandbox of the system's; subprocess: as a process that may read and write what the run may;
    # or a dotted name
    python.sandbox = "monty"
    python.timeout_s = 5.0  # of one snippet
    python.memory_mib = 64.0  # of one snippet; packages as numpy need about 1024
    python.max_output = 100_000  # bytes that a snippet may print
    env.search.search_r1 = amounts = ConfigDict()  # what this protocol's format and answer pay
    amounts.format_reward = 0.5  # a response that keeps to the protocol
    amounts.format_failure = -1.0  # one that does not
    amounts.answer_reward = 1.0  # an answer close to the truth
    amounts.exact_match_bonus = 2.0  # the truth itself, in place of that
    amounts.not_found = 0.5  # the answer 未找到相关内容, "no relevant content found"
    env.search.qwen = ConfigDict()  # what this protocol's format pays
    env.search.qwen.format_reward = 0.0  # a response that keeps to the protocol
    env.search.qwen.format_failure = -1.0  # one that does not

    config.search = search = ConfigDict(convert_dict=False)
    # local: embedded index over a corpus; http: a retriever on a port; web: a provider of web
    # searches; opensearch: an index of OpenSearch or Elasticsearch; dense: vectors of an encoder;
    # hybrid: local and dense, fused; empty: finds nothing; none: there is no such tool, with
    # env.search.protocol='qwen'; or a dotted name
    search.engine = "local"
    search.settings = {}  # keyword arguments of an engine of your own
    # What stands around any engine, in this order; docs/environments.md has the whole.
    search.cache_mib = 64.0  # MiB of results kept in memory, the least recently used go; 0: none
    search.cache_ttl_s = 0.0  # seconds for which a kept result counts; 0: for ever
    search.queries_per_second = 0.0  # sent at most, those of a batch one by one; 0: no limit
    # Calls of the engine under way at most, a batch is one; 0: as many as the engine says.
    search.max_concurrent = 0
    search.deadline_s = 120.0  # seconds after which one call of the engine has failed
    # Further tries of a query that fails while the engine answers others; then its episode ends as
    # an environment error. While nobody gets an answer, tries do not count.
    search.retries = 3
    # Seconds before the first of them, doubled from try to try up to 30, and a quarter more or
    # less. A server's Retry-After counts for all queries.
    search.backoff_s = 1.0
    search.breaker_failures = 8  # failed calls in a row after which nobody asks; 0: never
    search.breaker_rest_s = 5.0  # seconds until one call tries again
    # Seconds in which nobody has got an answer, after which the engine counts as down.
    search.outage_deadline_s = 300.0
    # What follows. stop: the run saves and ends with exit code 69. empty: episodes go on with what
    # an old cache holds or with an empty result, and end as environment errors.
    search.on_outage = "stop"
    # record: results are kept on disk, and what is there is not asked again; only: these alone
    # answer, without an engine; off: neither.
    search.replay = "off"
    search.replay_folder = ""  # of the recording; "": searches/ in the workdir
    search.local = ConfigDict()
    search.local.corpus = ""  # JSONL of documents: id, title, text
    search.local.index = ""  # folder of the index; default: beside the corpus
    search.local.topk = 3  # documents a query returns
    search.http = http = ConfigDict()
    http.url = ""  # of the server, as http://127.0.0.1:8000/retrieve
    http.protocol = "search_r1"  # or flashrag
    http.topk = 3  # documents a query returns
    # The environment variable that holds a key, which is sent as a bearer's; "": none is sent.
    http.key_env = ""
    http.timeout_s = 30.0  # of a request, to the last byte of its answer
    http.connections = 16  # requests in flight at most
    http.batch_size = 64  # queries in a request at most
    http.max_response_mib = 64.0  # of an answer; one that is larger is a failure
    search.web = web = ConfigDict()
    web.provider = "serper"  # or brave, tavily, searxng
    web.url = ""  # of a service of your own, as a SearXNG; default: the provider's
    web.topk = 3  # results a query returns
    # The environment variable that holds the key; default: SERPER_API_KEY, BRAVE_API_KEY,
    # TAVILY_API_KEY, and none for searxng.
    web.key_env = ""
    web.timeout_s = 30.0  # of a request, to the last byte of its answer
    web.connections = 8  # requests in flight at most
    web.max_response_mib = 16.0  # of an answer; one that is larger is a failure
    search.opensearch = opensearch = ConfigDict()
    opensearch.url = ""  # of the cluster, as https://search:9200
    opensearch.index = ""  # its name, or an alias
    opensearch.fields = ("title", "text")  # of a document: title and text, or its text alone
    opensearch.topk = 3  # documents a query returns
    # basic:VARIABLE, api_key:VARIABLE or bearer:VARIABLE, with the environment variable that holds
    # user:password, the encoded key, or the token; "": none
    opensearch.auth = ""
    opensearch.timeout_s = 30.0  # of a request, to the last byte of its answer
    opensearch.connections = 8  # requests in flight at most
    opensearch.batch_size = 64  # queries in a request at most
    search.dense = _dense()
    search.hybrid = hybrid = ConfigDict()  # its engines are those of search.local and search.dense
    hybrid.topk = 3  # documents a query returns
    # A document scores the sum of 1 / (k + rank) over both engines: the larger, the less the first
    # ranks count before those behind them.
    hybrid.k = 60.0
    hybrid.candidates = 100  # documents of each engine that are fused

    config.reward = reward = ConfigDict(convert_dict=False)
    # Weights of the environment's reward parts, and of further ones: math_verify, which compares
    # final answers as mathematics (extra math); judges, by their names; functions of your own, by
    # dotted name, in our, verl's or TRL's signature. The reward is the weighted sum.
    reward.weights = {"exact_match": 1.0}
    # Keyword arguments of functions of your own, as {"my_reward.brevity": {"words": 50}}.
    reward.settings = {}
    # Seconds for the functions of a batch, after which the episodes that still wait are environment
    # errors. 0: never, and functions that are not async run in the run's own thread, one by one.
    reward.deadline_s = 600.0
    # The part that makes an answer correct: exact_match, f1, bapo, math or one that is not the
    # environment's, where it is above 0; answer, where the answer is the truth or close to it,
    # whatever that pays.
    reward.correct = "exact_match"

    # Language models that grade responses, by name, as {"helpful": {"url": "http://judge:8000/v1",
    # "model": "judge", "prompt": "..{response}.."}}; jaxrl/envs/judges.py has all settings.
    reward.judges = {}
    reward.math_verify = ConfigDict()
    # Seconds of computing that a comparison may take; an answer that takes more is not equal.
    reward.math_verify.deadline_s = 5.0
    reward.math_verify.memory_mib = 1024  # of each worker; likewise
    reward.math_verify.workers = 2  # processes that compare, of each process of the run

    config.shaping = shaping = ConfigDict()
    shaping.overlong_buffer = 0  # tokens before the limit over which the penalty grows; 0: off
    # The limit, tool text counted. 0: in math rollout.max_response_tokens, and where there are
    # tools what rollout.max_total_tokens leaves beside the longest prompt.
    shaping.overlong_max_tokens = 0
    shaping.overlong_factor = 1.0  # reward lost at the limit and beyond
    shaping.boundary_aware = False  # pay for "I don't know" in groups without a correct answer
    shaping.abstention_bonus = 0.5  # what it pays
    # Share of abstentions in a batch from which it pays nothing in the early stage.
    shaping.abstention_rate = 0.1
    shaping.stage_level = True  # an early stage first; late once evaluations stop improving
    # Evaluations below the best one that the early stage outlives, over the whole run.
    shaping.stage_tolerance = 5
    shaping.sample_level = True  # late, pay nothing to groups whose answers still differ much
    shaping.entropy_reward = False  # pay by difficulty for tokens before which the policy wavers
    shaping.centred_gain = False  # its gains start at 0 rather than at half of their size
    shaping.entropy_window = 4  # tokens whose mean entropy makes a window
    shaping.entropy_percentile = 95.0  # of each trajectory's windows; their median is the threshold
    shaping.entropy_decay = 0.99  # of the threshold's moving average
    shaping.trigger_words = ()  # only tokens that are one of these words count; (): all
    shaping.alpha_init = 0.5  # coefficient of the entropy reward, by difficulty
    shaping.alpha_step = 0.05  # its change per token of distance from the target
    shaping.alpha_max = 2.0  # it stays between 0 and this
    shaping.bootstrap_tasks = (
        0  # tasks rolled out before the first step, to set all this up; -1: all
    )

    config.rollout = rollout = ConfigDict()
    rollout.tasks_per_step = 16  # groups trained on a step; without a filter the tasks drawn
    rollout.group_size = 8  # trajectories of each task
    # Of sampling, and of the log-probabilities that are trained on; evaluation has its own.
    rollout.temperature = 1.0
    rollout.top_p = 1.0  # draw from the likeliest tokens of this probability; 1: from all
    rollout.max_prompt_tokens = 1024  # of a task's prompt
    # What becomes of a longer prompt. refuse: the run does not begin; drop: its task is left out;
    # truncate_left: its first tokens are cut off.
    rollout.overlong_prompts = "refuse"
    rollout.max_response_tokens = 512  # sampled tokens of a trajectory, over all turns
    rollout.max_total_tokens = 2048  # prompt, sampled tokens and observations of a trajectory
    # Image tokens of a trajectory, in prompt and observations: for so many sampler and update have
    # room where images are read. 0: as many as max_total_tokens, or where nothing answers a turn as
    # max_prompt_tokens.
    rollout.max_image_tokens = 0
    # Tokens of one result, the rest of which is cut off inside its tags.
    rollout.max_observation_tokens = 500
    rollout.max_turns = 4  # turns that call tools; asking once more ends the episode
    rollout.max_calls = 0  # calls in all these turns; the model is told of one beyond. 0: no limit
    # What the calls of a trajectory may cost at ledger.prices, each counted once; a call that would
    # cost more ends it, out of budget. 0: no limit.
    rollout.max_cost = 0.0
    # Trajectories decoded side by side, in all; a multiple of data * fsdp * expert * context.
    rollout.num_rows = 64
    # GiB of each device for their keys and values. 0: what the plan leaves, or on a CPU what
    # num_rows trajectories of full length fill.
    rollout.cache_gib = 0.0
    rollout.chunk_tokens = 16  # decoding steps between two looks of the host
    # True: replies of the environment enter after a fixed number of chunks, and a run repeats bit
    # for bit. False: at the first chunk after they have arrived, for slow tools.
    rollout.deterministic = True
    # Chunks from the one in which a row stops to the one before which the reply enters. With 1
    # the device waits for host and environment between chunks, with more it decodes meanwhile.
    rollout.observation_lag_chunks = 2
    # 1: the groups of a step are sampled while the step before updates, by the weights before that
    # update. 0: after it.
    rollout.ahead = 0
    # Batches in a row of which every episode failed, after which the run stops with exit code 69;
    # without a filter a step is a batch. So does a final evaluation of which all failed. 0: never.
    rollout.max_failed_steps = 3

    config.filter = group_filter = ConfigDict(convert_dict=False)
    # none; varied: groups whose metric differs (dynamic sampling); accuracy_range: groups whose
    # mean accuracy lies in a range (online filtering); or one of your own by its dotted name.
    group_filter.name = "none"
    group_filter.settings = {}  # keyword arguments of a filter of your own
    group_filter.varied = ConfigDict()
    # acc: correct or not; score: reward before shaping; seq_reward: after it; seq_final_reward:
    # less the KL term in the reward.
    group_filter.varied.metric = "acc"
    group_filter.accuracy_range = ConfigDict()
    group_filter.accuracy_range.low = 0.01  # both ends are out
    group_filter.accuracy_range.high = 0.99
    group_filter.tasks_per_batch = 0  # drawn at a time until enough are kept; 0: tasks_per_step
    group_filter.max_batches = 10  # of one step, after which the run gives up; 0: never
    group_filter.carry_over = (
        False  # keep leftover groups for the next step instead of dropping them
    )
    group_filter.resample_attempts = (
        0  # new tries at groups all wrong without an abstention; 0: none
    )
    group_filter.resample_early = False  # in the early stage of shaping.stage_level too
    group_filter.skip_solved = False  # draw tasks no more once all their samples are right and sure
    group_filter.skip_entropy = 0.1  # nats; below this mean entropy they are sure

    config.advantage = advantage = ConfigDict(convert_dict=False)
    # grpo, rloo, reinforce_plus_plus, pass_at_k, and of the last pass_at_k_combination,
    # pass_at_k_exceeding, pass_at_k_full_sampling, pass_at_k_bootstrap, pass_at_k_entropy_guided;
    # or one of your own by its dotted name, as my_estimator.estimate
    advantage.name = "grpo"
    advantage.settings = {}  # keyword arguments of an estimator of your own
    # True: a turn's tokens carry what is earned from that turn on, compared with what the others of
    # the group earn from that turn on. False: all tokens carry the whole reward.
    advantage.by_turn = False
    advantage.turn_discount = 1.0  # by turns: of a reward for each turn that lies before it
    advantage.grpo = ConfigDict()
    advantage.grpo.normalize_std = True  # divide by the group's standard deviation
    advantage.grpo.ddof = 1  # 0: standard deviation of the population, 1: of the sample
    advantage.grpo.epsilon = 1e-6  # added to the standard deviation
    advantage.reinforce_plus_plus = ConfigDict()
    advantage.reinforce_plus_plus.baseline = False  # subtract the group's mean first
    advantage.pass_at_k = ConfigDict()  # of its variants too
    advantage.pass_at_k.k = 4  # answers of which one has to be right
    # Pairs (step, k), the first at step 0: k once so many steps of the train stage are done, as
    # ((0, 4), (60, 1)); (): advantage.pass_at_k.k throughout.
    advantage.pass_at_k.k_schedule = ()

    config.loss = loss = ConfigDict(convert_dict=False)
    loss.name = "clip"  # clip, gspo or cispo; or one of your own by its dotted name
    loss.settings = {}  # keyword arguments of a loss of your own
    # The ratio's floor is 1 - clip_low, its ceiling 1 + clip_high. GSPO was published with 3e-4 and
    # 4e-4, CISPO with 1 (no floor) and 4.
    loss.clip_low = 0.2
    loss.clip_high = 0.2
    loss.clip = ConfigDict()
    loss.clip.dual_clip = 0.0  # bound of the loss at negative advantages, above 1; 0: none
    # token-mean, seq-mean-token-mean, seq-mean-token-sum or seq-mean-token-sum-norm; or one of
    # your own by its dotted name
    loss.aggregation = "token-mean"
    loss.entropy_coef = 0.0  # bonus on the entropy of the sampled tokens' distributions
    loss.mask_observations = True  # False also trains on what the search engine wrote
    loss.correction = correction = ConfigDict()  # importance weights, trainer over sampler
    correction.level = "none"  # none, token or sequence
    correction.mode = "truncate"  # truncate: at most cap; mask: 0 outside low to high
    correction.cap = 2.0
    correction.low = 0.5
    correction.high = 5.0

    config.kl = kl = ConfigDict()
    kl.coef = 0.0  # weight of the KL term, where controlled its first value; 0: no term
    # k1, k2, k3, abs, with + for the gradient of k2; or one of your own by its dotted name
    kl.estimator = "k3"
    kl.anchor = "ref"  # ref: the policy at the start of the stage; old: before the update
    kl.place = "loss"  # loss, or reward: taken off the trajectory's reward
    # fixed; adaptive: towards target; log: the same by the logarithm; budget: by difficulty
    kl.controller = "fixed"
    kl.adaptive = ConfigDict()
    kl.adaptive.target = 0.1  # nats a token
    kl.adaptive.horizon = 10_000  # trajectories in which it moves
    kl.log = ConfigDict()
    kl.log.target = 0.1  # nats a token; ARES's code has 0.01
    kl.budget = ConfigDict()
    kl.budget.budgets = ConfigDict({"easy": 0.05, "medium": 0.1, "hard": 0.2})  # nats a token
    kl.budget.step = 0.01  # of the multiplier, per nat beyond the budget
    kl.low_factor = 1.0  # on the term where a window of high entropy follows; 1: off
    kl.second_chance = False  # less of it on wrong answers to easy tasks that wavered much

    config.optimizer = _optimizer()
    config.optimizer.num_minibatches = 1  # optimizer steps per batch and epoch; whole groups each
    config.optimizer.num_epochs = 1  # times each batch is gone through
    # Trajectories without a gradient go forward through the update, for its metrics, and not back:
    # the step is the same and quicker.
    config.optimizer.skip_signal_free = True

    config.sft = sft = ConfigDict()
    sft.source = ""  # JSONL of chats: {"messages": [user, assistant, tool, assistant, …]}
    sft.num_steps = 100  # optimizer steps of the sft stage
    sft.batch_size = 32  # demonstrations a step
    sft.optimizer = _optimizer()

    config.eval = evaluation = ConfigDict()
    # Steps between evaluations while training; always before the first and after the last step.
    evaluation.every_steps = 0
    # While training, out of sampled, greedy, empty_search (sampled; the engine finds nothing),
    # random_search (sampled; it finds documents of the corpus drawn at random) and blank_images
    # (sampled; images are there, and show nothing).
    evaluation.suites = ("sampled", "greedy")
    evaluation.final_suites = ("sampled", "greedy", "empty_search")  # of the evaluate stage
    # Of each question, at most 256; greedy has one.
    evaluation.samples = 1
    evaluation.temperature = 1.0  # of these samples
    evaluation.top_p = 1.0  # as rollout.top_p, of these samples
    evaluation.ks = ()  # of pass@k and maj@k; (): powers of two below samples, and samples
    evaluation.resamples = 1000  # bootstrap resamples of the questions, for the intervals
    evaluation.max_tasks = 0  # the first so many tasks of each held-out source; 0: all
    # A name in metrics.jsonl, higher is better: what checkpoint.keep_best and patience go by.
    evaluation.best_metric = "val-core/all/exact_match/mean@1"
    # Evaluations in a row without improvement that end the train stage; 0: off.
    evaluation.patience = 0
    evaluation.min_delta = 0.0  # improvement of best_metric that counts for patience; above this

    config.ledger = ledger = ConfigDict(convert_dict=False)
    # What a tool or a judge is paid each time that it is asked, in a unit of yours, by its name: as
    # {"search": 0.001}; the others are free. Answers of a cache or a recording cost nothing.
    ledger.prices = {}
    # What the run may spend, in that unit, and how often it may ask them. Once a step or an
    # evaluation has reached it, the run saves and ends with exit code 78. 0: no limit.
    ledger.max_cost = 0.0
    ledger.max_calls = 0

    config.checkpoint = checkpoint = ConfigDict()
    checkpoint.every_steps = 20  # steps between checkpoints; stages end with one
    checkpoint.keep = 2  # newest ones kept
    # Kept beside them: so many with the highest eval.best_metric; above 0, the best evaluation so
    # far makes a checkpoint due.
    checkpoint.keep_best = 0

    config.log = log = ConfigDict()
    log.trajectories = 32  # a step's first trajectories written to trajectories/; -1: all
    log.wandb_project = ""  # project on Weights & Biases that metrics also go to; none when empty
    return config


def refuse(key: str, value: Any, expected: str) -> None:
    """Raises a ValueError that says what a key holds and what was expected."""
    raise ValueError(f"config.{key} is {value!r}; expected {expected}.")

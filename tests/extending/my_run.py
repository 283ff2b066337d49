from jaxrl.config import default_config


def get_config():
    config = default_config().lock()
    config.num_steps = 3
    config.model.path = "model"
    config.tasks.train.source = "train.parquet"
    config.tasks.eval.source = "test.parquet"
    config.search.engine = "http"
    config.search.http.url = "http://127.0.0.1:8000/retrieve"
    config.reward.weights = {"my_score.compute_score": 1.0}
    config.rollout.tasks_per_step = 4
    config.rollout.group_size = 4
    config.rollout.max_prompt_tokens = 64
    config.rollout.max_response_tokens = 64
    config.rollout.max_observation_tokens = 72
    config.rollout.max_total_tokens = 256
    config.rollout.max_num_seqs = 16
    config.optimizer.micro_rows = 2
    return config

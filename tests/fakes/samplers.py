"""A sampler of Optuna for tests that must know the order of the trials."""

from optuna.samplers import BaseSampler


class ListedOrder(BaseSampler):
    """Trial n gets the n-th listed value of every setting."""

    def infer_relative_search_space(self, study, trial):
        return {}

    def sample_relative(self, study, trial, search_space):
        return {}

    def sample_independent(self, study, trial, param_name, param_distribution):
        return param_distribution.choices[trial.number % len(param_distribution.choices)]


def listed_order(*, seed: int, num_startup_trials: int) -> BaseSampler:
    return ListedOrder()

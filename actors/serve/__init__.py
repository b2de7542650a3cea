"""A model behind the endpoint of agents, without a learner: `streamrl serve MODEL_OR_RUN`."""

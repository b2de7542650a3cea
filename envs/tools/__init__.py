"""Tools that a model may call in an episode: the tools, how calls are read, the environment that answers them."""
